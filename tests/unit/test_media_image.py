"""Pictures of every kind: right pixels, or the right error."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.Image import Transpose

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.image import FORMATS, decode, probe
from spmd_encoder.media.pixels import Background

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of the damage done here

WHITE = (255, 255, 255)
LOSSLESS = {"PNG": {}, "BMP": {}, "TIFF": {}, "GIF": {}, "WEBP": {"lossless": True}}


def save(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def sample(width: int = 24, height: int = 16) -> Image.Image:
    """Few colours, so that GIF is exact; every corner differs."""
    image = Image.new("RGB", (width, height), (200, 30, 30))
    image.paste((20, 200, 20), (0, 0, width // 2, height // 2))
    image.paste((20, 20, 200), (0, height // 2, width // 2, height))
    return image


def png(width: int, bits: int, colour_type: int, row: bytes, transparent: bytes = b"") -> bytes:
    """A PNG of one row, written by hand for what Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, 1, bits, colour_type, 0, 0, 0)
    trns = chunk(b"tRNS", transparent) if transparent else b""
    body = chunk(b"IHDR", header) + trns + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def refused(action: Callable[[], object], code: ErrorCode) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        action()
    assert caught.value.code is code
    return caught.value


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format: str) -> None:
    data = save(sample(), format, **LOSSLESS.get(format, {}))
    assert probe(data)[:3] == (format, 24, 16)
    decoded = decode(data)
    assert decoded.mode == "RGB"
    difference = np.abs(np.asarray(decoded, int) - np.asarray(sample(), int))
    assert difference.max() == 0 if format in LOSSLESS else difference.mean() < 12


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_first_frame_of_several(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    other = Image.new("RGB", (24, 16), (1, 2, 3))
    data = save(sample(), format, save_all=True, append_images=[other], **options)
    assert probe(data)[1:3] == (24, 16)
    assert np.abs(np.asarray(decode(data), int) - np.asarray(sample(), int)).mean() < 12


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (3, 300), (300, 3), (2, 2), (27, 257)])
def test_small_and_thin(size: tuple[int, int]) -> None:
    data = save(Image.new("L", size, 7))
    assert probe(data)[1:3] == size
    assert decode(data).size == size
    assert decode(data).getpixel((0, 0)) == (7, 7, 7)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation(format: str, turn: int) -> None:
    undo = {
        1: None,
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_90,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_270,
    }[turn]
    stored = sample() if undo is None else sample().transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = turn
    decoded = decode(save(stored, format, exif=exif))
    assert decoded.size == (24, 16)
    for xy in [(1, 1), (22, 1), (1, 14), (22, 14)]:
        assert np.abs(np.subtract(decoded.getpixel(xy), sample().getpixel(xy))).max() < 40


def test_damaged_exif_is_no_reason_to_refuse() -> None:
    data = save(sample(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    assert decode(data).size == (24, 16)


def test_transparency_is_composited_on_white() -> None:
    hidden = Image.new("RGBA", (2, 1), (0, 255, 0, 0))
    hidden.putpixel((1, 0), (0, 0, 0, 128))
    for format in ("PNG", "WEBP", "TIFF"):
        decoded = decode(save(hidden, format, **({"lossless": True, "exact": True} if format == "WEBP" else {})))
        assert decoded.getpixel((0, 0)) == WHITE
        assert abs(decoded.getpixel((1, 0))[0] - 127) <= 1
    assert decode(save(Image.new("LA", (1, 1), (9, 0)))).getpixel((0, 0)) == WHITE
    assert decode(save(Image.new("LA", (1, 1), (9, 255)))).getpixel((0, 0)) == (9, 9, 9)
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 255, 0, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    for transparent in (0, b"\0\xff"):
        decoded = decode(save(palette, transparency=transparent))
        assert (decoded.getpixel((0, 0)), decoded.getpixel((1, 0))) == (WHITE, (1, 2, 3))
    assert decode(save(palette, "GIF", transparency=0)).getpixel((0, 0)) == WHITE
    keyed = save(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert decode(keyed).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize(
    ("background", "clear", "half"), [("white", 255, 127), ("black", 0, 0), ("drop", 40, 0)], ids=str
)
def test_what_transparency_is_laid_on(background: Background, clear: int, half: int) -> None:
    hidden = Image.new("RGBA", (2, 1), (40, 40, 40, 0))
    hidden.putpixel((1, 0), (0, 0, 0, 128))
    decoded = decode(save(hidden), background=background)
    assert decoded.getpixel((0, 0)) == (clear,) * 3
    assert abs(decoded.getpixel((1, 0))[0] - half) <= 1
    grey = decode(png(2, 16, 0, b"\x28\x00\x80\x00", b"\x28\x00"), background=background)
    assert grey.getpixel((0, 0)) == (clear,) * 3
    if background == "drop":
        assert decoded.tobytes() == hidden.convert("RGB").tobytes(), "as Pillow's own conversion"


@pytest.mark.parametrize(
    ("bits", "row", "transparent", "second"),
    [
        (1, b"\x80", b"\0\1", 0),
        (2, b"\xd0", b"\0\3", 85),
        (4, b"\xf1", b"\0\x0f", 17),
        (8, b"\xff\x01", b"\0\xff", 1),
        (16, b"\xff\xff\x80\x00", b"\xff\xff", 128),
    ],
)
def test_grey_with_a_transparent_value(bits: int, row: bytes, transparent: bytes, second: int) -> None:
    decoded = decode(png(2, bits, 0, row, transparent))
    assert decoded.getpixel((0, 0)) == WHITE
    assert decoded.getpixel((1, 0)) == (second,) * 3
    if bits > 1:  # the other one transparent: the first stays what it is
        other = {2: b"\0\1", 4: b"\0\1", 8: b"\0\1", 16: b"\x80\x00"}[bits]
        assert decode(png(2, bits, 0, row, other)).getpixel((1, 0)) == WHITE


def test_deep_colour_with_a_transparent_value() -> None:
    row = b"\xff\xff\x00\x01\x00\x01" + b"\x80\x00\x40\x00\x20\x00"
    decoded = decode(png(2, 16, 2, row, row[:6]))
    assert (decoded.getpixel((0, 0)), decoded.getpixel((1, 0))) == (WHITE, (128, 64, 32))


def test_deep_grey_is_scaled_not_clipped() -> None:
    ramp = np.array([[0, 257, 32896, 65535]], np.uint16)
    for image in (Image.fromarray(ramp), Image.fromarray(ramp.astype(np.int32))):
        for format in ("PNG", "TIFF"):
            if image.mode == "I" and format == "PNG":
                continue
            grey = np.asarray(decode(save(image, format)))
            assert grey[0, :, 0].tolist() == [0, 1, 128, 255]
    big_endian = Image.frombytes("I;16B", (4, 1), ramp.astype(">u2").tobytes())
    assert np.asarray(decode(save(big_endian, "TIFF")))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 500.0, 1000.0], [0, 128, 255]),
        ([float("nan"), 0.0, 1.0], [0, 0, 255]),
        ([-5.0, -5.0, -5.0], [0, 0, 0]),
    ],
)
def test_float_samples(values: list[float], grey: list[int]) -> None:
    data = save(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert np.asarray(decode(data))[0, :, 0].tolist() == grey


def test_other_colour_spaces() -> None:
    assert decode(save(Image.new("1", (8, 8), 1))).getpixel((3, 3)) == WHITE
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    for format in ("JPEG", "TIFF"):
        red = decode(save(cmyk, format)).getpixel((5, 5))
        assert red[0] > 245 and max(red[1:]) < 10
    ycbcr = sample().convert("YCbCr")
    assert np.abs(np.asarray(decode(save(ycbcr, "TIFF")), int) - np.asarray(sample(), int)).max() <= 4
    lab_profile, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    lab = ImageCms.profileToProfile(sample(), srgb, lab_profile, outputMode="LAB")
    assert lab is not None
    assert np.abs(np.asarray(decode(save(lab, "TIFF")), int) - np.asarray(sample(), int)).max() <= 8


def test_views_are_read_too() -> None:
    assert decode(memoryview(save(sample()))).size == (24, 16)
