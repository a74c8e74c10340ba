"""Width and height from the first part of a file, in time and memory that its sender cannot choose.

This is read for every item in the process that serves all, before anything else is done. Pillow opens a file by reading
all that comes before its pixels, in Python, part by part: a file of nothing but such parts takes it minutes and
gigabytes. Here a part costs a look at its first bytes and is skipped; what Pillow would make of the rest is found out
where the picture is decoded, in a process whose time is bounded. The sizes are those that Pillow comes to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

Size = tuple[int, int]
"""(width, height) in pixels."""

MAX_PARTS = 4096
"""Most parts (segments, chunks, boxes, entries) before the size is known: a few ms. A JPEG of 64 MiB that is all
metadata has 1,024 segments; a PNG or TIFF has a hundred chunks or entries."""
MAX_BLOCKS = 4 * MAX_PARTS
"""The same for a GIF, whose blocks are of 255 bytes at most: 1 MB of XMP takes some 14,000."""
MAX_AVIF_TABLE_BYTES = 64 * 1024
"""Largest table of items in an AVIF: some 3,000 of them. The largest pictures are grids of a few hundred. libavif looks
each item up in a list, so that a hundred thousand would take it a minute."""
MAX_AVIF_MOVIE_BYTES = 256 * 1024
"""Largest description of an AVIF's animation, which may hold such tables, too: that of some 10,000 frames."""


class HeaderTooLongError(ValueError):
    """There is more before the size than any real file has."""


class HeaderError(ValueError):
    """The size is not where it must be."""


def read_size(name: str, data: bytes) -> Size:
    """The size of a file of the format `name`, one of `READERS`.

    Raises `HeaderTooLongError`, or `HeaderError` where the file is damaged or ends too early.
    """
    try:
        return READERS[name](data)
    except (IndexError, OverflowError, struct.error):
        raise HeaderError("the file ends within its header") from None


def check_avif(data: bytes) -> None:
    """Raises `HeaderTooLongError` where libavif, which reads the size of these, would take long to open the file."""
    for kind, start, end in boxes(data, 0, len(data)):
        if kind == b"moov" and end - start > MAX_AVIF_MOVIE_BYTES:
            raise HeaderTooLongError
        if kind == b"meta":
            for table, first, last in boxes(data, start + 4, end):
                _check_avif_table(data, table, first, last)


def _check_avif_table(data: bytes, table: bytes, start: int, end: int) -> None:
    if table in (b"iinf", b"iloc", b"iref", b"ipma") and end - start > MAX_AVIF_TABLE_BYTES:
        raise HeaderTooLongError
    if table == b"iprp":
        for inner, first, last in boxes(data, start, end):
            _check_avif_table(data, inner, first, last)
    if table == b"ipco":  # may hold a colour profile of megabytes; its boxes are counted
        for _ in boxes(data, start, end):
            pass


def _jpeg(data: bytes) -> Size:
    """The last frame header before the first scan."""
    size = None
    end = 2
    for _ in parts():
        if (found := _MARKER.search(data, end)) is None:
            break
        marker, end = found[1][0], found.end()
        if marker == 0 or marker in _JPEG_ALONE:
            continue
        if marker < 0xC0:
            raise HeaderError("there is something other than a marker")
        (length,) = _U16.unpack_from(data, end)
        if marker in _JPEG_FRAMES:
            _, height, width = struct.unpack_from(">BHH", data, end + 2)
            size = width, height
        if marker == 0xDA:
            break
        end += max(2, length)
    return _known(size)


def _png(data: bytes) -> Size:
    """The last IHDR before the pixels, which are none where no IHDR has said of what kind."""
    size, is_known = None, False
    end = 8
    for _ in parts():
        length, kind = struct.unpack_from(">I4s", data, end)
        if kind == b"IEND" or (is_known and kind in (b"IDAT", b"fdAT")):
            break
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack_from(">IIBB", data, end + 8)
            size = width, height
            is_known = is_known or depth in _PNG_DEPTHS.get(colour, ())
        end += 12 + length
    return _known(size)


def _gif(data: bytes) -> Size:
    """The screen, or what the first frame needs where that is more."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    end = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    counted = parts(MAX_BLOCKS)
    for _ in counted:
        introducer = data[end]
        end += 1
        if introducer == ord(","):
            x, y, w, h = struct.unpack_from("<4H", data, end)
            return max(width, x + w), max(height, y + h)
        if introducer == ord(";"):
            break
        if introducer == ord("!"):
            end = _after_extension(data, end, counted)
    raise HeaderError("there is no frame")


def _after_extension(data: bytes, end: int, counted: Iterator[int]) -> int:
    """Pillow looks for the end of most extensions behind their first block, also where that is the end already."""
    is_comment, block = data[end] == 254, data[end + 1]
    is_loop = data[end] == 255 and data[end + 2 : end + 2 + block].startswith(b"NETSCAPE2.0")
    end += 2 + block
    if is_comment and not block:
        return end
    if is_loop:
        end += 1 + data[end]
    for _ in counted:
        block = data[end]
        end += 1 + block
        if not block:
            break
    return end


def _webp(data: bytes) -> Size:
    """The canvas, or the only frame."""
    match data[12:16]:
        case b"VP8X":
            low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", data, 24)
            return low_w + (high_w << 16) + 1, low_h + (high_h << 16) + 1
        case b"VP8L" if data[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    raise HeaderError("the first chunk is no picture")


def _bmp(data: bytes) -> Size:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    elif header in (40, 52, 56, 64, 108, 124):
        width, height = struct.unpack_from("<II", data, 18)
        if data[25] == 0xFF:  # rows from top to bottom
            height = 2**32 - height
    else:
        raise HeaderError("the header has an unknown size")
    return width, height


def _tiff(data: bytes) -> Size:
    """Of the first directory, upright where it says how the picture is turned. Of entries with equal tags the first
    counts whose values are in the file; values elsewhere than in their entry may have as many bytes as the file, all
    together."""
    order = "<" if data[:2] == b"II" else ">"
    # BigTIFF, or classic: a place, the number of entries, and an entry (tag, type, count, before its value or place).
    place, number, layout = ("Q", "Q", "HHQ") if data[2] == 43 else ("I", "H", "HHI")
    room = struct.calcsize(place)
    (start,) = struct.unpack_from(order + place, data, room)
    (count,) = struct.unpack_from(order + number, data, start)
    start += struct.calcsize(number)
    step = struct.calcsize("=" + layout) + room
    found: dict[int, int] = {}
    seen, elsewhere = set[int](), 0
    for entry, _ in zip(range(start, min(len(data) - step + 1, start + step * count), step), parts(), strict=False):
        tag, kind, times = struct.unpack_from(order + layout, data, entry)
        if tag in seen or kind not in _TIFF_BYTES or not times:
            continue
        value = entry + step - room
        if (size := _TIFF_BYTES[kind] * times) > room:
            (value,) = struct.unpack_from(order + place, data, value)
            elsewhere += size
            if elsewhere > len(data):
                continue
            if value + size > len(data):
                break  # nothing more is read
        seen.add(tag)
        if tag in _TIFF_WANTED and kind in _TIFF_WHOLE:
            (found[tag],) = struct.unpack_from(order + _TIFF_WHOLE[kind], data, value)
    if not {256, 257} <= found.keys():
        raise HeaderError("the size is missing, or no whole number")
    width, height = found[256], found[257]
    return (height, width) if found.get(_TIFF_TURN) in (5, 6, 7, 8) else (width, height)


def parts(most: int = MAX_PARTS) -> Iterator[int]:
    """Counts them. Raises `HeaderTooLongError` when they are too many."""
    yield from range(most)
    raise HeaderTooLongError


def boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each box's content; what is no box ends them."""
    for _ in parts():
        if start + 8 > end:
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        content = start + 8
        if length == 1 and start + 16 <= end:
            (length,) = struct.unpack_from(">Q", data, content)
            content += 8
        stop = end if length == 0 else start + length
        if not content <= stop <= end:
            return
        yield kind, content, stop
        start = stop


def _known(size: Size | None) -> Size:
    if size is None:
        raise HeaderError("the size is missing")
    return size


_U16 = struct.Struct(">H")
_MARKER = re.compile(rb"\xff+([^\xff])", re.DOTALL)
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC})
_JPEG_ALONE = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_PNG_DEPTHS = MappingProxyType({0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)})
_TIFF_TURN = 274
_TIFF_WANTED = frozenset({256, 257, _TIFF_TURN})
_TIFF_BYTES = MappingProxyType(
    {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
)
_TIFF_WHOLE = MappingProxyType({3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q"})

READERS: Mapping[str, Callable[[bytes], Size]] = MappingProxyType(
    {"JPEG": _jpeg, "PNG": _png, "GIF": _gif, "WEBP": _webp, "BMP": _bmp, "TIFF": _tiff}
)
