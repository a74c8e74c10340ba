"""Headers of Matroska and WebM files (RFC 9559): pure and bounded in time."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from spmd_encoder.media.facts import Facts
from spmd_encoder.media.header import MAX_PARTS, HeaderError, HeaderTooLongError, parts

_EBML, _DOC_TYPE = 0x1A45DFA3, 0x4282
_SEGMENT, _INFO, _TRACKS = 0x18538067, 0x1549A966, 0x1654AE6B
_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK, _VIDEO, _WIDTH, _HEIGHT = 0xAE, 0xE0, 0xB0, 0xBA
MAX_ELEMENTS = 4 * MAX_PARTS
"""Most elements before size and length are known, in all; a track has some twenty."""
_DEFAULT_SCALE = 1_000_000
"""Nanoseconds per unit of time."""


def flavour(head: bytes) -> str:
    """WEBM or MATROSKA, by the file's first bytes."""
    try:
        _, start, end = _element(head, 0, len(head))
        found = _elements(head, start, end, parts())
        types = [head[first:last] for kind, first, last in found if kind == _DOC_TYPE]
    except (HeaderError, HeaderTooLongError, IndexError):
        types = []
    return "WEBM" if any(name.rstrip(b"\0") == b"webm" for name in types) else "MATROSKA"


def read(data: bytes) -> Facts:
    """The length is the segment's, where it has one; a recorder that cannot go back to write it leaves it out."""
    kind, _, position = _element(data, 0, len(data))
    kind, start, end = _element(data, position, len(data))
    if kind != _SEGMENT:
        raise HeaderError("there is no segment")
    facts = Facts(complete=end <= len(data))
    tracks_seen = info_seen = False
    counted = parts(MAX_ELEMENTS)
    for kind, first, last in _elements(data, start, min(end, len(data)), counted):
        if kind == _INFO:
            info_seen, facts = True, facts._replace(seconds=_seconds(data, first, last, counted))
        elif kind == _TRACKS:
            width, height = _picture_size(data, first, last, counted)
            tracks_seen, facts = True, facts._replace(width=width, height=height)
        if tracks_seen and info_seen:
            break
    if not tracks_seen:
        raise HeaderError("there are no tracks")
    return facts


def _seconds(data: bytes, start: int, end: int, counted: Iterator[int]) -> float:
    scale, duration = _DEFAULT_SCALE, 0.0
    for kind, first, last in _elements(data, start, end, counted):
        if kind == _SCALE:
            scale = _whole(data, first, last)
        elif kind == _DURATION and last - first in (4, 8):
            (duration,) = struct.unpack_from(">f" if last - first == 4 else ">d", data, first)
    seconds = duration * scale / 1e9
    return seconds if 0 < seconds < float("inf") else 0.0


def _picture_size(data: bytes, start: int, end: int, counted: Iterator[int]) -> tuple[int, int]:
    """Of the first track with pictures, (0, 0) where there is none."""
    for kind, first, last in _elements(data, start, end, counted):
        if kind != _TRACK:
            continue
        for inner, video, video_end in _elements(data, first, last, counted):
            if inner == _VIDEO:
                inside = _elements(data, video, video_end, counted)
                sizes = {k: _whole(data, a, b) for k, a, b in inside if k in _SIZES}
                return sizes.get(_WIDTH, 0), sizes.get(_HEIGHT, 0)
    return 0, 0


_SIZES = frozenset({_WIDTH, _HEIGHT})


def _whole(data: bytes, start: int, end: int) -> int:
    return int.from_bytes(data[start : min(end, start + 8)], "big")


def _elements(data: bytes, start: int, end: int, counted: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    """Kind, start and end of each element's content; one that goes beyond `end` is the last, and cut."""
    while start < end:
        next(counted)
        kind, first, last = _element(data, start, end)
        yield kind, first, min(last, end)
        start = last


def _element(data: bytes, start: int, end: int) -> tuple[int, int, int]:
    """One element: kind, start and end of its content. The end may lie beyond `end`; an unknown size ends there."""
    id_bytes = _vint_bytes(data[start])
    size_at = start + id_bytes
    size_bytes = _vint_bytes(data[size_at])
    first = size_at + size_bytes
    kind = int.from_bytes(data[start:size_at], "big")
    most = (1 << 7 * size_bytes) - 1
    size = int.from_bytes(data[size_at:first], "big") & most
    return kind, first, end if size == most else first + size


def _vint_bytes(head: int) -> int:
    if not head:
        raise HeaderError("there is no element")
    return 9 - head.bit_length()
