"""Headers of MP4, MOV and M4A files (ISO/IEC 14496-12): pure and bounded in time."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from spmd_encoder.media.facts import Facts
from spmd_encoder.media.header import MAX_PARTS, HeaderError, HeaderTooLongError, boxes, parts

MAX_BOXES = 16 * MAX_PARTS
"""Most boxes of the file itself: two per fragment, and two hours have some thousand fragments. Some tens of ms."""
MAX_INNER = 4 * MAX_PARTS
"""Most boxes within the movie box that are looked at, in all."""
_UNIT = 1 << 16  # of the matrix' fixed-point numbers


def read(data: bytes) -> Facts:
    """The length is the longest track's, or that of the fragments where the movie box has none."""
    first: dict[bytes, tuple[int, int]] = {}
    complete = True
    for kind, start, end in _top_boxes(data):
        complete = complete and end <= len(data)
        first.setdefault(kind, (start, min(end, len(data))))
    if b"moov" not in first:
        raise HeaderError("there is no movie box")
    counted = parts(MAX_INNER)
    width = height = 0
    for kind, start, end in _boxes(data, *first[b"moov"], counted):
        if kind == b"trak" and not width:
            width, height = _picture_size(data, start, end, counted)
        first.setdefault(kind, (start, end))
    return Facts(seconds=_seconds(data, first, counted), width=width, height=height, complete=complete)


def _seconds(data: bytes, first: dict[bytes, tuple[int, int]], counted: Iterator[int]) -> float:
    """Of the movie; else of its fragments, by the two boxes that may tell."""
    seconds, scale = _duration(data, first[b"mvhd"][0]) if b"mvhd" in first else (0.0, 0)
    if not seconds and scale and b"mvex" in first:
        for kind, start, _ in _boxes(data, *first[b"mvex"], counted):
            if kind == b"mehd":
                (duration,) = struct.unpack_from(">Q" if data[start] == 1 else ">I", data, start + 4)
                seconds = duration / scale
    if not seconds and b"sidx" in first:
        seconds = _segment_seconds(data, first[b"sidx"][0])
    return seconds


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


def _duration(data: bytes, start: int) -> tuple[float, int]:
    """(seconds, time scale) from a mvhd box; 0 seconds where it says that they are unknown."""
    if data[start] == 1:
        scale, duration = struct.unpack_from(">IQ", data, start + 20)
        unknown = (1 << 64) - 1
    else:
        scale, duration = struct.unpack_from(">II", data, start + 12)
        unknown = (1 << 32) - 1
    return duration / scale if scale and duration != unknown else 0.0, scale


def _segment_seconds(data: bytes, start: int) -> float:
    """The sum over a sidx box that stands for the whole file."""
    (scale,) = struct.unpack_from(">I", data, start + 8)
    position = start + (28 if data[start] == 1 else 20)
    (count,) = struct.unpack_from(">H", data, position + 2)
    durations = struct.unpack_from(">" + "4xI4x" * count, data, position + 4)
    return sum(durations) / scale if scale else 0.0


def _picture_size(data: bytes, start: int, end: int, counted: Iterator[int]) -> tuple[int, int]:
    """Of a track of pictures, upright; (0, 0) of any other. The size is the coded one, not how wide it is shown."""
    turned, is_picture, width, height = False, False, 0, 0
    for kind, first, last in _within(data, start, end, counted, (b"mdia", b"minf", b"stbl")):
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


def _within(
    data: bytes, start: int, end: int, counted: Iterator[int], path: tuple[bytes, ...]
) -> Iterator[tuple[bytes, int, int]]:
    """The boxes there, and those within the boxes of `path`, each of which lies in the one before."""
    for kind, first, last in _boxes(data, start, end, counted):
        yield kind, first, last
        if path and kind == path[0]:
            yield from _within(data, first, last, counted, path[1:])


def _boxes(data: bytes, start: int, end: int, counted: Iterator[int]) -> Iterator[tuple[bytes, int, int]]:
    for found in boxes(data, start, end):
        next(counted)
        yield found
