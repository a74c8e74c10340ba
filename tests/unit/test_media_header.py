"""Sizes from headers: those that Pillow comes to, of any real file, and an end to files that are all header."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from spmd_encoder.errors import ErrorCode
from spmd_encoder.media.header import MAX_BLOCKS, READERS, HeaderError, HeaderTooLongError, read_size
from spmd_encoder.media.image import FORMATS, HAS_AVIF, probe
from tests.harness.examples import examples
from tests.unit.test_media_image import refused, sample, save

MANY = MAX_BLOCKS + 1
NOISE = random.Random(3).randbytes(5 * 2**20)


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def jpeg(*parts: bytes) -> bytes:
    whole = save(sample(), "JPEG")
    return whole[:2] + b"".join(parts) + whole[2:]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(*parts: bytes) -> bytes:
    whole = save(sample(), "PNG")
    return whole[:33] + b"".join(parts) + whole[33:]


def gif(*parts: bytes) -> bytes:
    whole = save(sample(), "GIF")
    end = 13 + (3 << (whole[10] & 7) + 1)
    return whole[:end] + b"".join(parts) + whole[end:]


def box(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + name + content


def boxes(data: bytes) -> dict[bytes, bytes]:
    found, start = {}, 0
    while start < len(data):
        (length,) = struct.unpack_from(">I", data, start)
        found[data[start + 4 : start + 8]] = data[start + 8 : start + length]
        start += length
    return found


def avif(**tables: bytes) -> bytes:
    """With some tables of its items replaced."""
    top = boxes(save(sample(), "AVIF"))
    inner = boxes(top[b"meta"][4:]) | {name.encode(): content for name, content in tables.items()}
    meta = top[b"meta"][:4] + b"".join(box(name, content) for name, content in inner.items())
    return box(b"ftyp", top[b"ftyp"]) + box(b"meta", meta) + box(b"mdat", top[b"mdat"])


def tiff(entries: int, kind: int = 3) -> bytes:
    """A directory of so many entries that are of no use."""
    table = struct.pack("<HHII", 700, kind, 1, 7) * entries
    return b"II*\0" + struct.pack("<IH", 8, entries) + table + bytes(4)


ENDLESS = {
    "empty segments": jpeg(segment(0xE5, b"") * MANY),
    "comments": jpeg(segment(0xFE, b"x") * MANY),
    "markers alone": jpeg(b"\xff\xd0" * MANY),
    "escapes": jpeg(b"\xff\0" * MANY),
    "frames": jpeg(segment(0xC0, b"\x08\0\x10\0\x18\x01\x01\x11\0") * MANY),
    "quantization": jpeg(segment(0xDB, b"\0" + b"\1" * 64) * MANY),
    "private chunks": png(chunk(b"abCd", b"") * MANY),
    "texts": png(chunk(b"tEXt", b"a\0") * MANY),
    "profiles": png(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20 - 1))) * MANY),
    "comment blocks": gif(b"!\xfe" + b"\1x" * MANY + b"\0"),
    "extensions": gif(b"!\1\0\0" * MANY),
    "junk": gif(bytes(MANY)),
    "entries": tiff(MANY),
} | (
    {
        "items": avif(iinf=bytes(4) + b"\xff\xff" + bytes(70_000)),
        "places": avif(iloc=bytes(70_000)),
        "boxes": save(sample(), "AVIF") + box(b"free", b"") * MANY,
        "animation": save(sample(), "AVIF") + box(b"moov", bytes(300_000)),
    }
    if HAS_AVIF
    else {}
)


@pytest.mark.parametrize("data", ENDLESS.values(), ids=ENDLESS)
def test_files_that_are_all_header_are_refused(data: bytes) -> None:
    assert "longer than that of any real one" in refused(lambda: probe(data), ErrorCode.MEDIA_CORRUPT).message


def test_what_no_reader_ends_on_is_skipped_at_once() -> None:
    """Pillow takes minutes for each of these."""
    for filler in (b"\xff" * 2**25, b"\xff\xe0\0\2" + bytes(2**25)):
        assert probe(jpeg(filler))[:3] == ("JPEG", 24, 16)
    data = save(sample(), "WEBP", lossless=True)
    assert probe(data + (b"abcd" + bytes(4)) * 2**20)[:3] == ("WEBP", 24, 16)


def with_icc(format: str, num_bytes: int) -> bytes:
    return save(
        sample().convert("CMYK" if format in ("JPEG", "TIFF") else "RGB"), format, icc_profile=NOISE[:num_bytes]
    )


LARGE = {
    "a profile of megabytes in a CMYK JPEG": with_icc("JPEG", 4 * 2**20),
    "a profile in a TIFF": with_icc("TIFF", 5 * 2**20),
    "a profile in a WebP": with_icc("WEBP", 2**20),
    "a profile in a PNG": with_icc("PNG", 2**20),
    "EXIF and a thumbnail in several segments": jpeg(*[segment(0xE1, b"Exif\0\0" + NOISE[:65000])] * 12),
    "a depth map in extended XMP": jpeg(
        *[segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + NOISE[:65000])] * 150
    ),
    "Photoshop's resources": jpeg(*[segment(0xED, b"Photoshop 3.0\0" + NOISE[:65000])] * 20),
    "texts of megabytes": png(chunk(b"tEXt", b"workflow\0" + b"x" * 2**22), chunk(b"eXIf", NOISE[: 2**20])),
    "a thousand small chunks": png(chunk(b"tEXt", b"a\0b") * 1000),
    "XMP in a GIF": gif(b"!\xff\x0bXMP DataXMP", b"".join(b"\x40" + b"A" * 64 for _ in range(15_000)) + b"\0"),
} | ({"a profile in an AVIF": with_icc("AVIF", 2**20)} if HAS_AVIF else {})


@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE)
def test_large_headers_of_real_files_pass(data: bytes) -> None:
    assert probe(data)[1:3] == (24, 16)


def turned_tiff() -> bytes:
    directory = ImageFileDirectory_v2()
    directory[274] = 6
    return save(sample(), "TIFF", tiffinfo=directory)


def files() -> dict[str, list[bytes]]:
    other = Image.new("RGB", (24, 16), (1, 2, 3))
    animated = {"save_all": True, "append_images": [other]}
    info = PngImagePlugin.PngInfo()
    info.add_itxt("a", "b", zip=True)
    return {
        "JPEG": [save(sample(), "JPEG", progressive=p, comment=b"\xff\xc0\0\x11") for p in (False, True)]
        + [save(sample(), "MPO", **animated)],
        "PNG": [save(sample(), "PNG", pnginfo=info), save(sample(), "PNG", **animated)],
        "GIF": [save(sample(), "GIF", **animated, loop=0, comment=b"c" * 600, transparency=1)],
        "WEBP": [save(sample(), "WEBP", lossless=b) for b in (False, True)] + [save(sample(), "WEBP", **animated)],
        "BMP": [save(sample().convert(mode), "BMP") for mode in ("RGB", "L", "P", "RGBA")],
        "TIFF": [save(sample(), "TIFF"), turned_tiff(), save(sample(), "TIFF", big_tiff=True, compression="tiff_lzw")],
    }


def pillows_size(name: str, data: bytes) -> tuple[int, int] | None:
    try:
        with Image.open(io.BytesIO(data), formats=[name]) as image:
            return image.size
    except Exception:
        return None


def damaged(data: bytes, choose: random.Random) -> bytes:
    """A few bytes of its first part changed, then perhaps a piece of it doubled or cut out."""
    broken = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(min(len(broken), choose.choice((100, 800))))
        broken[at] = choose.choice((0, 1, 2, 255, choose.randrange(256)))
    at = choose.randrange(min(len(broken), 800))
    match choose.randrange(10):
        case 0 | 1:
            broken[at:at] = broken[choose.randrange(len(broken)) :][: choose.randrange(40)]
        case 2:
            del broken[at : at + choose.randrange(20)]
    return bytes(broken)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", READERS)
def test_pillow_comes_to_the_same_size(name: str) -> None:
    """Of damaged files too, or the price of a picture could be chosen by its sender."""
    opened, whole = 0, files()[name]

    @examples(15)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal opened
        choose = random.Random(seed)
        for data in (data for data in whole for _ in range(100)):
            broken = damaged(data, choose)
            if (theirs := pillows_size(name, broken)) is not None:
                opened += 1
                assert read_size(name, broken) == theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [read_size(name, data) for data in whole] == [pillows_size(name, data) for data in whole]
        check()
    assert opened > 100


WIDTH, HEIGHT = (256, 3, 1, 24), (257, 3, 1, 16)
UNKNOWN, LIES = 700, 10_000
ENTRIES = {
    "values that are not in the file": ([WIDTH, (257, 3, LIES, 8), HEIGHT], (24, 16)),
    "values behind the file's end": ([WIDTH, HEIGHT, (UNKNOWN, 1, 100, 5001), (274, 3, 1, 6)], (24, 16)),
    "more values than the file has": (
        [(UNKNOWN, 1, 5000, 8), (UNKNOWN + 1, 1, 5000, 8), (256, 3, 3, 8), WIDTH, HEIGHT],
        (24, 16),
    ),
    "another tag's values, twice": ([(UNKNOWN, 3, 1, 7), (UNKNOWN, 1, 5100, 8), (256, 3, 3, 8), HEIGHT], (6, 16)),
    "equal tags": ([WIDTH, HEIGHT, (256, 3, 1, LIES), (257, 3, 1, LIES)], (24, 16)),
    "unknown kinds and no values": ([(256, 99, 1, LIES), (257, 3, 0, LIES), WIDTH, HEIGHT], (24, 16)),
}


@pytest.mark.parametrize(("entries", "size"), ENTRIES.values(), ids=ENTRIES)
def test_entries_of_a_tiff_count_as_for_pillow(entries: list[tuple[int, ...]], size: tuple[int, int]) -> None:
    table = b"".join(struct.pack("<HHII", *entry) for entry in [(262, 3, 1, 1), (273, 4, 1, 8), *entries])
    data = (b"II*\0" + struct.pack("<IH", 8, len(table) // 12) + table).ljust(5100, b"\0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_size("TIFF", data) == size == pillows_size("TIFF", data)


def test_pixels_of_a_png_count_as_for_pillow() -> None:
    """Where no IHDR has said of what kind they are, they are passed over, and the next one has the size."""
    whole, pixels = save(sample(), "PNG"), chunk(b"IDAT", b"x")
    header = struct.pack(">IIBBBBB", 1, 1, 8, 9, 0, 0, 0)
    for before in (pixels, chunk(b"IHDR", header) + pixels, chunk(b"IHDR", header)):
        data = whole[:8] + before + whole[8:]
        assert read_size("PNG", data) == (24, 16) == pillows_size("PNG", data)


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_give_a_size_or_a_header_error(name: str) -> None:
    choose = random.Random(5)
    starts = [data[: choose.randrange(120)] for data in files()[name] for _ in range(30)]
    for start in starts:
        for tail in (b"", choose.randbytes(60), b"\xff" * 50, bytes(50)):
            try:
                width, height = read_size(name, start + tail)
            except (HeaderError, HeaderTooLongError):
                continue
            assert isinstance(width, int) and isinstance(height, int)


def test_every_format_has_a_reader_or_a_guard() -> None:
    assert set(FORMATS) - {"AVIF"} == set(READERS)
