"""A clip that comes as a list of pictures, as one byte string: pure.

`SPMDCLIP`, then little-endian: frames per second (float64), number of pictures (uint32), and each picture's file after
its length (uint32).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Buffer

_MAGIC = b"SPMDCLIP"
_HEAD = struct.Struct("<8sdI")
_LENGTH = struct.Struct("<I")
MIN_FPS, MAX_FPS = 1e-3, 1e3
MAX_FILES = 20_000
"""Most pictures of one clip, which are taken apart for every item in the process that serves all: some ms."""


class Clip(NamedTuple):
    """`files`: views of each picture's file bytes, in order, at least one."""

    fps: float
    files: tuple[memoryview, ...]

    @property
    def seconds(self) -> float:
        return len(self.files) / self.fps


def pack(files: Sequence[Buffer], fps: float) -> bytes:
    """One byte string that `unpack` takes apart.

    Raises `EncoderError`: INVALID_REQUEST where there is no file, or `fps` is not within `MIN_FPS` and `MAX_FPS`.
    """
    if not files:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the clip has no pictures")
    if not MIN_FPS <= fps <= MAX_FPS:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST, f"the clip's frames per second must be from {MIN_FPS:g} to {MAX_FPS:g}"
        )
    pieces: list[Buffer] = [_HEAD.pack(_MAGIC, fps, len(files))]
    for file in files:
        pieces += (_LENGTH.pack(len(file)), file)
    return b"".join(pieces)


def is_packed(data: Buffer) -> bool:
    return bytes(data[: len(_MAGIC)]) == _MAGIC


def unpack(data: Buffer, max_files: int = MAX_FILES) -> Clip:
    """Raises `EncoderError`: MEDIA_CORRUPT where `data` is not as `pack` makes it, TOO_LARGE above `max_files`."""
    view = memoryview(data)
    if len(view) < _HEAD.size or not is_packed(data):
        raise _corrupt("it ends within its header")
    _, fps, count = _HEAD.unpack_from(view)
    if not (math.isfinite(fps) and MIN_FPS <= fps <= MAX_FPS):
        raise _corrupt(f"its frames per second are not from {MIN_FPS:g} to {MAX_FPS:g}")
    if count == 0:
        raise _corrupt("it has no pictures")
    if count > max_files:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the clip has {count} pictures, more than the limit of {max_files} (--max-video-frames-decoded)",
        )
    files = []
    position = _HEAD.size
    for index in range(count):
        if position + _LENGTH.size > len(view):
            raise _corrupt(f"it ends before frame {index}")
        (length,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if position + length > len(view):
            raise _corrupt(f"it ends within frame {index}")
        files.append(view[position : position + length])
        position += length
    if position != len(view):
        raise _corrupt("there is more behind its last frame")
    return Clip(fps, tuple(files))


def _corrupt(why: str) -> EncoderError:
    return EncoderError(ErrorCode.MEDIA_CORRUPT, f"the clip cannot be taken apart: {why}")
