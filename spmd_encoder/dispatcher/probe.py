"""The picture, or the sound or film, that the server sends to itself."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from spmd_encoder.api.types import MediaItem, Modality
from spmd_encoder.media.frames import pack

SIDE = 112
RATE = 16_000


def probe_item(modalities: Sequence[Modality]) -> MediaItem:
    """An ordinary item for every family that takes pictures, or else for every one that takes sounds, or films."""
    if Modality.IMAGE in modalities:
        return _picture()
    return _film() if Modality.VIDEO in modalities and Modality.AUDIO not in modalities else _sound()


@cache
def _picture() -> MediaItem:
    """A small PNG with a colour ramp."""
    rows = b"".join(b"\0" + b"".join(bytes((2 * x, 2 * y, (x + y) & 255)) for x in range(SIDE)) for y in range(SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return MediaItem(modality=Modality.IMAGE, data=data, digest=_digest(data), width=SIDE, height=SIDE)


@cache
def _sound() -> MediaItem:
    """A second of a sawtooth of 125 Hz as a WAV file of 16-bit samples."""
    samples = struct.pack(f"<{RATE}h", *(256 * (n % 128) - 16384 for n in range(RATE)))
    fmt = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    parts = b"WAVE" + b"fmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", len(samples)) + samples
    data = b"RIFF" + struct.pack("<I", len(parts)) + parts
    return MediaItem(modality=Modality.AUDIO, data=data, digest=_digest(data), seconds=1.0)


@cache
def _film() -> MediaItem:
    """The picture twice, a second apart, as a list, which no codec has to decode."""
    data = pack([_picture().data] * 2, fps=1.0)
    picture = replace(_picture(), modality=Modality.VIDEO, seconds=2.0, frames=2)
    return replace(picture, data=data, digest=_digest(data))


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
