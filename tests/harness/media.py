"""Sounds and films made on the spot by PyAV's encoders, of signals that are known."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Signal = npt.NDArray[np.float64]


def tone(num_samples: int, rate: int, hertz: float = 440.0, amplitude: float = 0.5) -> Signal:
    """`[n]`, a sine."""
    signal: Signal = amplitude * np.sin(2 * np.pi * hertz * np.arange(num_samples) / rate)
    return signal


def sound(
    container: str,
    codec: str,
    rate: int,
    channels: Signal,
    options: Mapping[str, str] | None = None,
    cover: bool = False,
    muxer: Mapping[str, str] | None = None,
) -> bytes:
    """A file of `channels` `[n]`, or `[k, n]` with k of 1, 2, 6 or 8; with `cover`, beside a picture track."""
    values = np.atleast_2d(channels).astype(np.float32)
    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[len(values)]
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=dict(muxer or {})) as file:
        if cover:
            pictures: Any = file.add_stream("libx264", rate=5)
            pictures.width, pictures.height = 32, 32
        stream: Any = file.add_stream(codec, rate=rate, layout=layout, options=dict(options or {}))
        stream.codec_context.open(strict=False)
        if cover:
            for packet in (*pictures.encode(av.VideoFrame(32, 32)), *pictures.encode(None)):
                file.mux(packet)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values.T).reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        pieces = av.AudioResampler(
            format=stream.format.name, layout=layout, rate=rate, frame_size=stream.codec_context.frame_size or 4096
        )
        for piece in (*pieces.resample(frame), *pieces.resample(None), None):
            for packet in stream.encode(piece):
                file.mux(packet)
    return out.getvalue()


def wav(values: npt.NDArray[Any], rate: int, bits: int = 0, declared: int | None = None) -> bytes:
    """A WAV file of `values` `[n]` or `[n, channels]` in their own dtype (uint8, int16, int32, float32, float64), or
    of the upper 24 bits of int32; `declared` replaces the size of the samples."""
    values = values[:, None] if values.ndim == 1 else values
    raw = values.tobytes()
    bits = bits or 8 * values.dtype.itemsize
    if bits == 24:
        raw = values.astype("<i4").view(np.uint8).reshape(*values.shape, 4)[..., 1:].tobytes()
    tag = 3 if values.dtype.kind == "f" else 1
    align = values.shape[1] * bits // 8
    fmt = struct.pack("<HHIIHH", tag, values.shape[1], rate, rate * align, align, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"data"
    body += struct.pack("<I", len(raw) if declared is None else declared) + raw
    return b"RIFF" + struct.pack("<I", len(body)) + body


def film(
    container: str,
    codec: str,
    pictures: Iterable[npt.NDArray[np.uint8]],
    *,
    times: Iterable[int] | None = None,
    time_base: Fraction = Fraction(1, 25),
    pixels: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    set_up: Callable[[Any], None] | None = None,
    with_sound: bool = False,
    muxer: Mapping[str, str] | None = None,
) -> bytes:
    """A film of `pictures`, each `[height, width, 3]`; picture i is shown at `times[i] * time_base`, else at i / 25 s.

    `set_up` is given the encoder's context before it is opened.
    """
    out = io.BytesIO()
    frames = list(pictures)
    rate = 1 / time_base
    with av.open(out, "w", format=container, options=dict(muxer or {})) as file:
        stream: Any = file.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        context = stream.codec_context
        context.time_base = time_base
        context.thread_count = 1
        if set_up is not None:
            set_up(context)
        sounds: Any = file.add_stream("aac", rate=16_000, layout="mono") if with_sound else None
        for index, (picture, time) in enumerate(zip(frames, times or range(len(frames)), strict=True)):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(
                format=pixels, dst_colorspace=context.colorspace or None, dst_color_range=context.color_range or None
            )
            frame.pts, frame.time_base = time, time_base
            for packet in stream.encode(frame):
                file.mux(packet)
            if sounds is not None and index == 0:
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                silence.sample_rate, silence.pts = 16_000, 0
                for packet in sounds.encode(silence):
                    file.mux(packet)
        for each in (stream, sounds):
            for packet in each.encode(None) if each is not None else ():
                file.mux(packet)
    return out.getvalue()
