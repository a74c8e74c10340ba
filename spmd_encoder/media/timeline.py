"""When the frames of a film are shown, and which must be decoded to get at some of them: pure.

A film has as many frames as are shown, whatever its header says, and is sampled by time: frame i of the ideal film,
which has the same number of frames at a constant rate, is what is shown at `i / fps` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

_SLACK = 0.25
"""Of a frame's time: times are rounded, in Matroska to milliseconds, and a frame that starts that late is meant."""
_SAME_RATE = 0.2
"""Frames by which a film may differ at its end from the rate that its container gives, for that rate to be believed."""


@dataclass
class Packets:
    """The packets of a picture track in the order of decoding: when each is shown, and whether it is.

    `span` is from the first to the last that is shown, in the units of their times.
    """

    times: list[int] = field(default_factory=list)
    keys: list[bool] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    span: int = 0
    _earliest: int | None = None

    def add(self, time: int, *, is_key: bool, is_shown: bool) -> None:
        self.times.append(time)
        self.keys.append(is_key)
        self.shown.append(is_shown)
        if not is_shown:
            return
        if self._earliest is None:
            self._earliest = time
        elif time < self._earliest:
            self.span += self._earliest - time
            self._earliest = time
        elif time - self._earliest > self.span:
            self.span = time - self._earliest

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True)
class Run:
    """Packets `start` to `stop` (exclusive) are decoded one after another, and the decoder is emptied at the end."""

    start: int
    stop: int


class Timeline:
    """`packets` of a film whose times are in units of `unit` seconds; `rate` is what its container says, or None.

    At least one packet is shown.
    """

    def __init__(self, packets: Packets, unit: Fraction, rate: Fraction | None) -> None:
        self._packets = packets
        times = np.asarray(packets.times, np.int64)
        shown = np.flatnonzero(np.asarray(packets.shown, bool))
        self._order = shown[np.argsort(times[shown], kind="stable")]
        self._unit = float(unit)
        self._first = int(times[self._order[0]])
        self._seconds = (times[self._order] - self._first) * self._unit
        self.num_frames = len(self._order)
        self.fps = self._rate(float(self._seconds[-1]), float(rate) if rate else 0.0)

    @property
    def seconds(self) -> float:
        return self.num_frames / self.fps

    def shown_at(self, index: int) -> int:
        """The packet of what is shown when frame `index` of the ideal film is."""
        moment = (index + _SLACK) / self.fps
        return int(self._order[max(0, int(np.searchsorted(self._seconds, moment, side="right")) - 1)])

    def time_of(self, packet: int) -> float:
        """Seconds after the first frame."""
        return (self._packets.times[packet] - self._first) * self._unit

    def runs(self, wanted: Sequence[int]) -> list[Run]:
        """What to decode for the packets `wanted`: from the key frame before each, but nothing twice."""
        runs: list[Run] = []
        for packet, start in sorted(self._starts(wanted).items(), key=lambda item: (item[1], item[0])):
            if runs and start <= runs[-1].stop:
                runs[-1] = Run(runs[-1].start, max(runs[-1].stop, packet + 1))
            else:
                runs.append(Run(start, packet + 1))
        return runs

    def _starts(self, wanted: Sequence[int]) -> dict[int, int]:
        """The last key frame at or before each packet that is not shown after it (what a key frame's successors show
        before it needs the key frame before that one); the first packet where there is none."""
        keys = [position for position, is_key in enumerate(self._packets.keys) if is_key]
        times = self._packets.times
        found = {}
        for packet in set(wanted):
            before = int(np.searchsorted(keys, packet, side="right"))
            while before and times[keys[before - 1]] > times[packet]:
                before -= 1
            found[packet] = keys[before - 1] if before else 0
        return found

    def _rate(self, last: float, said: float) -> float:
        """Frames per second, on average."""
        between = self.num_frames - 1
        if said and abs(between - last * said) <= _SAME_RATE:
            return said
        if last > 0:
            return between / last
        return said or 1.0
