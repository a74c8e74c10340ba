"""The picture that the server sends to itself."""

from __future__ import annotations

import hashlib
import struct
import zlib
from functools import cache

from spmd_encoder.api.types import MediaItem, Modality

SIDE = 112


@cache
def probe_item() -> MediaItem:
    """A small PNG with a colour ramp: an ordinary item for every family of images."""
    rows = b"".join(b"\0" + b"".join(bytes((2 * x, 2 * y, (x + y) & 255)) for x in range(SIDE)) for y in range(SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    return MediaItem(modality=Modality.IMAGE, data=data, digest=digest, width=SIDE, height=SIDE)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
