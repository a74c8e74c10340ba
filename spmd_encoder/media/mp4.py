"""Headers of MP4, MOV and M4A files (ISO/IEC 14496-12): pure and bounded in time."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from spmd_encoder.media.facts import Facts
from spmd_encoder.media.header import MAX_PARTS, HeaderError, HeaderTooLongError, boxes

MAX_BOXES = 16 * MAX_PARTS
"""Most boxes of the file itself: two per fragment, and two hours have some thousand fragments. Some tens of ms."""
_UNIT = 1 << 16  # of the matrix' fixed-point numbers


def read(data: bytes) -> Facts:
    """The length is the longest track's, or that of the fragments where the movie box has none."""
    moov, seconds, complete = None, 0.0, True
    for kind, start, end in _top_boxes(data):
        complete = complete and end <= len(data)
        if kind == b"moov" and moov is None:
            moov = start, min(end, len(data))
        elif kind == b"sidx" and not seconds:
            seconds = _segment_seconds(data, start)
    if moov is None:
        raise HeaderError("there is no movie box")
    width = height = 0
    for kind, start, end in boxes(data, *moov):
        if kind == b"mvhd":
            seconds = _duration(data, start) or seconds
        elif kind == b"mvex":
            seconds = _fragments_seconds(data, start, end, moov) or seconds
        elif kind == b"trak" and not width:
            width, height = _picture_size(data, start, end)
    return Facts(seconds=seconds, width=width, height=height, complete=complete)


def _top_boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each box of the file; the end may lie beyond the file's."""
    position = 0
    for _ in range(MAX_BOXES):
        if position + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, position)
        start = position + 8
        if length == 1:
            if start + 8 > len(data):
                return
            (length,) = struct.unpack_from(">Q", data, start)
            start += 8
        end = len(data) if length == 0 else position + length
        if end < start:
            return
        yield kind, start, end
        position = end
    raise HeaderTooLongError


def _duration(data: bytes, start: int) -> float:
    """Seconds, from a mvhd or mdhd box; 0 where it says that they are unknown."""
    if data[start] == 1:
        scale, duration = struct.unpack_from(">IQ", data, start + 20)
        unknown = (1 << 64) - 1
    else:
        scale, duration = struct.unpack_from(">II", data, start + 12)
        unknown = (1 << 32) - 1
    return duration / scale if scale and duration != unknown else 0.0


def _fragments_seconds(data: bytes, start: int, end: int, moov: tuple[int, int]) -> float:
    """From a mvex box, in the time scale of the movie."""
    duration = scale = 0
    for kind, first, _ in boxes(data, start, end):
        if kind == b"mehd":
            (duration,) = struct.unpack_from(">Q" if data[first] == 1 else ">I", data, first + 4)
    for kind, first, _ in boxes(data, *moov):
        if kind == b"mvhd":
            (scale,) = struct.unpack_from(">I", data, first + (20 if data[first] == 1 else 12))
    return duration / scale if scale else 0.0


def _segment_seconds(data: bytes, start: int) -> float:
    """The sum over a sidx box that stands for the whole file."""
    (scale,) = struct.unpack_from(">I", data, start + 8)
    position = start + (28 if data[start] == 1 else 20)
    (count,) = struct.unpack_from(">H", data, position + 2)
    durations = struct.unpack_from(">" + "4xI4x" * count, data, position + 4)
    return sum(durations) / scale if scale else 0.0


def _picture_size(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Of a track of pictures, upright; (0, 0) of any other. The size is the coded one, not how wide it is shown."""
    turned, is_picture, width, height = False, False, 0, 0
    for kind, first, last in _inner(data, start, end):
        if kind == b"tkhd":
            a, b, _, c, d = struct.unpack_from(">5i", data, first + (52 if data[first] == 1 else 40))
            turned = abs(b) == abs(c) == _UNIT and a == d == 0
        elif kind == b"hdlr":
            is_picture = is_picture or data[first + 8 : first + 12] == b"vide"
        elif kind == b"stsd" and last - first >= 44:
            width, height = struct.unpack_from(">HH", data, first + 8 + 32)
    if not is_picture:
        return 0, 0
    return (height, width) if turned else (width, height)


def _inner(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """The boxes of a track, those within its media box and tables too."""
    for kind, first, last in boxes(data, start, end):
        if kind in (b"mdia", b"minf", b"stbl"):
            yield from _inner(data, first, last)
        else:
            yield kind, first, last
