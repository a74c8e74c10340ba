"""Damaged sounds and films of every format: an answer or an EncoderError, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import audio, video
from spmd_encoder.media.base import FilmLimits
from tests.harness.examples import examples
from tests.harness.media import film, sound, tone

LIMITS = FilmLimits(max_pixels=10**5, max_seconds=60, max_chosen=100, max_walked=200, max_bytes=2**24)
SIGNAL = tone(8_000, 16_000)
X265 = "log-level=none:pools=none:frame-threads=1"
NOISE = np.random.default_rng(7).integers(0, 255, (12, 32, 48, 3), np.uint8)
# AV1's encoder takes nothing smaller, and x265's assembly spoils the heap over frames of 48 x 32.
LARGER_NOISE = np.repeat(np.repeat(NOISE, 2, 1), 2, 2)


SOUNDS: dict[str, Callable[[], bytes]] = {
    "WAV": lambda: sound("wav", "pcm_s16le", 16_000, SIGNAL),
    "WAV of floats": lambda: sound("wav", "pcm_f32le", 16_000, SIGNAL),
    "FLAC": lambda: sound("flac", "flac", 16_000, SIGNAL),
    "MP3": lambda: sound("mp3", "libmp3lame", 16_000, SIGNAL),
    "Opus": lambda: sound("ogg", "libopus", 16_000, SIGNAL),
    "Vorbis": lambda: sound("ogg", "vorbis", 16_000, np.stack([SIGNAL, SIGNAL]), {"strict": "experimental"}),
    "M4A": lambda: sound("ipod", "aac", 16_000, SIGNAL),
    "AAC": lambda: sound("adts", "aac", 16_000, SIGNAL),
    "WebM, sound": lambda: sound("webm", "libopus", 16_000, SIGNAL),
}
FILMS: dict[str, Callable[[], bytes]] = {
    "H.264": lambda: film("mp4", "libx264", NOISE, with_sound=True),
    "H.264, fragments": lambda: film("mp4", "libx264", NOISE, muxer={"movflags": "frag_keyframe+empty_moov"}),
    "H.265": lambda: film("mov", "libx265", LARGER_NOISE, options={"x265-params": X265}),
    "VP8": lambda: film("webm", "libvpx", NOISE),
    "VP9": lambda: film("matroska", "libvpx-vp9", NOISE),
    "AV1": lambda: film("webm", "libsvtav1", LARGER_NOISE),
}
HOSTILE = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


@cache
def original(name: str) -> bytes:
    return (SOUNDS | FILMS)[name]()


def damaged(data: bytes, seed: int) -> bytes:
    """A few bytes changed (most of them in the header), then perhaps a piece cut out, doubled or filled."""
    choose = random.Random(seed)
    broken = bytearray(data)
    for _ in range(choose.choice((0, 1, 1, 2, 4, 16, 64))):
        end = choose.choice((64, 512, 2048, len(broken)))
        at = choose.randrange(min(end, len(broken)))
        if choose.random() < 0.3:
            at = len(broken) - 1 - at  # MP4 has its tables at the end
        width = choose.choice((1, 1, 2, 4, 8))
        value = choose.choice(HOSTILE) if choose.random() < 0.6 else choose.randrange(256)
        broken[at : at + width] = bytes([value]) * len(broken[at : at + width])
    start = choose.randrange(len(broken))
    stop = min(len(broken), start + choose.choice((1, 4, 50, 2000)))
    match choose.randrange(6):
        case 0:
            del broken[start:stop]
        case 1:
            broken[start:start] = broken[start:stop]
        case 2:
            broken[start:stop] = choose.randbytes(stop - start)
        case 3:
            del broken[start:]
    return bytes(broken)


def check(name: str, data: bytes) -> bool:
    """Whether it was decoded."""
    read: list[Callable[[], Any]] = [lambda: audio.probe(data), lambda: video.probe(data), lambda: decoded_film(data)]
    if name not in FILMS or "H.264" in name:
        read.append(lambda: decoded_sound(data))
    good = 0
    for action in read:
        try:
            action()
            good += 1
        except EncoderError as error:
            assert error.code in (ErrorCode.MEDIA_CORRUPT, ErrorCode.MEDIA_UNSUPPORTED, ErrorCode.TOO_LARGE)
            assert error.message.isascii() and len(error.message) < 500
    return good == len(read)


def decoded_sound(data: bytes) -> None:
    got = audio.decode(data, 24_000, 60)
    assert 0 < len(got.samples) <= 24_000 * 60 + 1 and np.isfinite(got.samples).all()


def decoded_film(data: bytes) -> None:
    got = video.decode(data, lambda info: sorted({0, info.num_frames // 2, info.num_frames - 1}), LIMITS)
    assert {frame.shape for frame in got.frames} == {(got.info.height, got.info.width, 3)}
    assert got.info.width * got.info.height <= LIMITS.max_pixels and got.info.fps > 0 and got.info.seconds > 0


@pytest.mark.parametrize("name", [*SOUNDS, *FILMS])
@examples(30)
@given(seed=st.integers(0, 2**32))
@example(4276)  # turns the AAC's one channel into 31
def test_damage_is_told_as_such(name: str, seed: int) -> None:
    check(name, damaged(original(name), seed))
