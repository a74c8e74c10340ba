"""From one sample rate to another, with libswresample."""

from __future__ import annotations

import math
from types import MappingProxyType

import av
import numpy as np
import numpy.typing as npt
from av.audio.resampler import AudioResampler

Samples = npt.NDArray[np.float32]

_TAPS = 256
OPTIONS = MappingProxyType(
    {
        "filter_size": str(_TAPS),
        "filter_type": "kaiser",
        "kaiser_beta": "12",
        "cutoff": "0.965",
        "linear_interp": "1",
        "exact_rational": "1",
    }
)
"""A windowed sinc. Sines of up to 0.93 of the lower Nyquist frequency are off by less than -115 dB, and of what lies
above that frequency less than -120 dB comes through (both measured, in float32). soxr's HQ, which librosa takes, passes
0.91. libswresample's own defaults let -18 dB through."""


class Resampler:
    """Mono float32 from `source` to `target` Hz, piece by piece; before its beginning and behind its end is silence."""

    def __init__(self, source: int, target: int) -> None:
        common = math.gcd(source, target)
        self._source, self._target = source, target
        self._swr = AudioResampler(format="flt", layout="mono", rate=target, options=dict(OPTIONS))
        # As much silence as the filter is long, and a whole number of samples at both rates.
        periods = math.ceil(_TAPS * max(1, source / target) / (source // common))
        self._silence = np.zeros(periods * (source // common), np.float32)
        self._skip = periods * (target // common)
        self._taken = 0
        self._given = 0
        self._started = False

    def push(self, samples: Samples) -> list[Samples]:
        """What comes out by now."""
        self._taken += len(samples)
        pieces = [samples] if self._started else [self._silence, samples]
        self._started = True
        return [out for piece in pieces for out in self._run(piece)]

    def finish(self) -> list[Samples]:
        """The rest: all pieces together have `ceil(n * target / source)` samples."""
        rest = self._run(self._silence) + self._run(None)
        total = -(-self._taken * self._target // self._source)
        surplus = self._given - total
        while surplus > 0 and rest:
            last = rest.pop()
            if len(last) > surplus:
                rest.append(last[:-surplus])
            surplus -= len(last)
        return rest

    def _run(self, samples: Samples | None) -> list[Samples]:
        frame = None
        if samples is not None:
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format="flt", layout="mono")
            frame.sample_rate = self._source
        out = []
        for made in self._swr.resample(frame):
            values = made.to_ndarray()[0]
            skipped = min(self._skip, len(values))
            self._skip -= skipped
            out.append(values[skipped:].astype(np.float32, copy=False))
            self._given += len(out[-1])
        return out
