"""Pictures put together of parts that no encoder writes so: the size that is read is Pillow's, where that opens them.

Else a sender could choose the size that his picture is priced by.
"""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from spmd_encoder.media.header import READERS, read_size
from tests.harness.examples import examples

PNG_KINDS = (b"IHDR", b"IHDR", b"IHDR", b"IDAT", b"fdAT", b"IEND", b"PLTE", b"tEXt", b"zTXt", b"iCCP")
PNG_OTHERS = (b"gAMA", b"pHYs", b"tRNS", b"eXIf", b"acTL", b"fcTL", b"abCd", b"ABCD")
JPEG_FRAMES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCB, 0xDE)
JPEG_ALONE = (0x01, 0xD0, 0xD7, 0xD8, 0xD9)
JPEG_OTHERS = (0xC4, 0xC8, 0xCC, 0xDB, 0xDC, 0xDD, 0xDF, 0xE0, 0xE1, 0xE2, 0xEE, 0xF0, 0xFD, 0xFE)
EXIF_TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
WEBP_KINDS = (b"VP8X", b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ICCP", b"EXIF", b"abcd")


def saved(choose: random.Random, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    mode = "RGB" if format == "WEBP" else choose.choice(("RGB", "L"))
    Image.new(mode, (choose.randint(1, 60), choose.randint(1, 60))).save(out, format, **options)
    return out.getvalue()


def with_some(choose: random.Random, parts: list[bytes], made: Callable[[random.Random], bytes]) -> bytes:
    for _ in range(choose.randrange(4)):
        parts.insert(choose.randint(0, len(parts)), made(choose))
    return b"".join(parts)


def jpeg(choose: random.Random) -> bytes:
    whole, segments, at = saved(choose, "JPEG", progressive=choose.random() < 0.3), list[bytes](), 2
    while whole[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", whole, at + 2)
        segments.append(whole[at : at + 2 + length])
        at += 2 + length
    return whole[:2] + with_some(choose, segments, jpeg_segment) + whole[at:]


def jpeg_segment(choose: random.Random) -> bytes:
    marker = choose.choice(choose.choice((JPEG_FRAMES, JPEG_ALONE, JPEG_OTHERS)))
    if marker in JPEG_ALONE and choose.random() < 0.7:
        return bytes((0xFF, marker))
    content = choose.choice((choose.randbytes(choose.randrange(8)), b"Adobe" + bytes(7), b"MPF\0", EXIF_TURNED))
    if marker in JPEG_FRAMES and choose.random() < 0.8:
        colours = choose.choice((1, 2, 3, 3, 4))
        frame = (choose.choice((8, 8, 8, 12, 0)), choose.randrange(70), choose.randrange(70), colours)
        content = struct.pack(">BHHB", *frame) + b"".join(bytes((number, 0x11, 0)) for number in range(colours))
    filler = choose.choice((b"", b"", b"", b"\xff\xff", b"\0", b"x"))
    length = choose.choice((0, 1, len(content) + 4)) if choose.random() < 0.05 else len(content) + 2
    return filler + struct.pack(">BBH", 0xFF, marker, length) + content


def png(choose: random.Random) -> bytes:
    whole, chunks, at = saved(choose, "PNG"), list[bytes](), 8
    while at < len(whole):
        (length,) = struct.unpack_from(">I", whole, at)
        chunks.append(whole[at : at + 12 + length])
        at += 12 + length
    return whole[:8] + with_some(choose, chunks, png_chunk)


def png_chunk(choose: random.Random) -> bytes:
    kind = choose.choice(PNG_KINDS + PNG_OTHERS)
    sides = choose.randint(1, 70), choose.randint(1, 70)
    content = choose.randbytes(choose.randrange(14))
    if kind == b"IHDR":
        content = struct.pack(">IIBBBBB", *sides, choose.choice((1, 8, 8)), choose.choice((0, 2, 9)), 0, 0, 0)
    elif kind == b"fcTL":
        content = struct.pack(">IIIIIHHBB", 0, *sides, 0, 0, 1, 1, 0, 0)
    elif kind == b"acTL":
        content = struct.pack(">II", choose.randrange(4), 0)
    if choose.random() < 0.2:
        content = content[: choose.randint(0, len(content))]
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def gif(choose: random.Random) -> bytes:
    whole = bytearray(saved(choose, "GIF"))
    end = 13 + (3 << (whole[10] & 7) + 1)
    if choose.random() < 0.4:
        whole[6:10] = struct.pack("<HH", choose.randrange(70), choose.randrange(70))
    if choose.random() < 0.2:
        whole[10] = choose.randrange(256)
    return bytes(whole[:end]) + with_some(choose, [], gif_block) + bytes(whole[end:])


def gif_block(choose: random.Random) -> bytes:
    if choose.random() < 0.4:
        pieces = (bytes((size,)) + choose.randbytes(size) for size in choose.choices((1, 4, 11), k=choose.randrange(3)))
        return b"!" + bytes((choose.choice((1, 0xF9, 0xFE, 0xFF)),)) + b"".join(pieces) + b"\0"
    if choose.random() < 0.2:
        return choose.randbytes(choose.randrange(3))
    place = [choose.randrange(side) for side in (5, 5, 90, 90)]
    colours = choose.choice(((0, b""), (0, b""), (0x40, b""), (0x81, bytes(12))))
    return b"," + struct.pack("<HHHHB", *place, colours[0]) + colours[1] + choose.choice((b"", b"\x02\1x\0"))


def webp(choose: random.Random) -> bytes:
    picture = saved(choose, "WEBP", lossless=choose.random() < 0.5)[12:]
    body = with_some(choose, [picture], webp_chunk)
    return b"RIFF" + struct.pack("<I", len(body) + choose.choice((4, 4, 4, 6, 2))) + b"WEBP" + body


def webp_chunk(choose: random.Random) -> bytes:
    kind, content = choose.choice(WEBP_KINDS), choose.randbytes(choose.randrange(12))
    if kind == b"VP8X":
        flags = choose.choice((0, 2, 0x10, 0x12, 0x20, 0x3E))
        content = bytes((flags, 0, 0, 0, choose.randrange(70), 0, 0, choose.randrange(70), 0, 0))
    return kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def bmp(choose: random.Random) -> bytes:
    whole = bytearray(saved(choose, "BMP"))
    for _ in range(choose.randint(1, 4)):
        whole[choose.randrange(56)] = choose.choice((0, 1, 2, 4, 8, 12, 16, 24, 32, 40, 64, 124, 255))
    if choose.random() < 0.3:
        whole[14:18] = struct.pack("<I", choose.choice((12, 16, 40, 52, 56, 64, 108, 124)))
    return bytes(whole)


def tiff(choose: random.Random) -> bytes:
    """One directory, of entries in any order, whose values may lie anywhere, also in the directory itself."""
    order, is_big, size = choose.choice("<>"), choose.random() < 0.4, choose.choice((300, 600, 1200))
    place, layout, room = ("Q", "HHQ", 8) if is_big else ("I", "HHI", 4)
    entries = [(256, 3, 1, 24), (257, 4, 1, 16), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1)]
    for _ in range(choose.randrange(7)):
        tag, kind = choose.choice((256, 257, 274, 274, 700, 701, 258)), choose.choice((*range(14), 3, 3, 4, 16, 99))
        times = choose.choice((0, 1, 1, 1, 2, 3, 5, size // 4, size // 2, size, 2**31))
        entries.append((tag, kind, times, choose.choice((0, 1, 5, 6, 8, 24, choose.randrange(size), size, size + 5))))
    if choose.random() < 0.7:
        choose.shuffle(entries)
    number = len(entries) + choose.choice((0, 0, 0, 0, 1, 5, -1))
    head = struct.pack(order + "HHHQQ", 43, 8, 0, 16, number) if is_big else struct.pack(order + "HIH", 42, 8, number)
    table = b""
    for tag, kind, times, value in entries:
        within = {1: "B", 3: "H", 6: "b", 8: "h"}.get(kind, place) if times == 1 and value < 128 else place
        table += struct.pack(order + layout, tag, kind, times) + struct.pack(order + within, value).ljust(room, b"\0")
    return ((b"II" if order == "<" else b"MM") + head + table).ljust(size, choose.choice((b"\0", b"\1", b"\5")))


MADE = {"JPEG": jpeg, "PNG": png, "GIF": gif, "WEBP": webp, "BMP": bmp, "TIFF": tiff}


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", READERS)
def test_the_size_is_pillows(name: str) -> None:
    opened = 0

    @examples(40)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal opened
        choose = random.Random(seed)
        for _ in range(25):
            data = MADE[name](choose)
            try:
                with Image.open(io.BytesIO(data), formats=[name]) as image:
                    theirs = image.size
            except Exception:
                continue
            opened += 1
            assert read_size(name, data) == theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()
    assert opened > 100


def test_every_format_is_made() -> None:
    assert MADE.keys() == READERS.keys()
