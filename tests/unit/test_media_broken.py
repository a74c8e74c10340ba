"""Damaged, foreign and oversized pictures: the right error, or the right pixels, and nothing else."""

import random
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.image import FORMATS, decode, probe, set_pixel_limit
from tests.harness.examples import examples
from tests.unit.test_media_image import LOSSLESS, png, refused, sample, save

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of the damage done here


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_at_every_cut(format: str) -> None:
    data = save(sample(12, 8), format, **LOSSLESS.get(format, {}))
    whole = np.asarray(decode(data))
    for length in range(len(data)):
        try:
            decoded = decode(data[:length])
        except EncoderError as error:
            assert error.code in (ErrorCode.MEDIA_CORRUPT, ErrorCode.MEDIA_UNSUPPORTED)
            assert error.code is ErrorCode.MEDIA_CORRUPT or length < 32
        else:  # only what comes after the pixels was cut off
            assert np.array_equal(np.asarray(decoded), whole), length


@pytest.mark.parametrize("format", FORMATS)
@examples(15)
@given(seed=st.integers(0, 2**32))
def test_damaged_at_any_place(format: str, seed: int) -> None:
    choose = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = save(sample(), format, **LOSSLESS.get(format, {}))
        for _ in range(10):
            broken = bytearray(data)
            for _ in range(choose.randint(1, 4)):
                broken[choose.randrange(len(broken))] = choose.randrange(256)
            try:
                assert decode(bytes(broken), 10**6).mode == "RGB"
            except EncoderError as error:
                assert error.code in (
                    ErrorCode.MEDIA_CORRUPT,
                    ErrorCode.MEDIA_UNSUPPORTED,
                    ErrorCode.TOO_LARGE,
                )


def test_zeroed_second_data_chunk_is_corrupt() -> None:
    noise = Image.frombytes("RGB", (300, 300), random.Random(1).randbytes(270000))
    data = bytearray(save(noise))
    second = data.index(b"IDAT", data.index(b"IDAT") + 4)
    data[second - 4 : second + 4] = bytes(8)
    refused(lambda: decode(bytes(data)), ErrorCode.MEDIA_CORRUPT)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7 secret", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0 secret", "PostScript"),
        (b"8BPS\0\1secret", "Photoshop"),
        (b"\0\0\0\x18ftypheic secret", "HEIF"),
        (b"\0\0\0\x18ftypisom secret", "film"),
        (b"secret secret secret secret secret", "not a picture"),
        (save(sample(), "PPM"), "not a picture"),
        (save(sample(), "ICO"), "icon"),
    ],
)
def test_other_kinds_are_unsupported(data: bytes, says: str) -> None:
    for action in (probe, decode):
        error = refused(lambda: action(data), ErrorCode.MEDIA_UNSUPPORTED)  # noqa: B023
        assert says in error.message and "PNG" in error.message and "secret" not in error.message


def test_pixel_limit_comes_from_the_header() -> None:
    header = png(60000, 8, 2, b"")  # 60,000 pixels announced, none there
    for action in (probe, decode):
        error = refused(lambda: action(header, 59999), ErrorCode.TOO_LARGE)  # noqa: B023
        assert "59999" in error.message and "--max-image-pixels" in error.message
    assert probe(header, 60000)[:3] == ("PNG", 60000, 1)
    refused(lambda: decode(header, 60000), ErrorCode.MEDIA_CORRUPT)


@pytest.mark.parametrize(("limit", "code"), [(200, ErrorCode.TOO_LARGE), (190_000_000, ErrorCode.MEDIA_CORRUPT)])
def test_pillows_own_limit_follows_ours(monkeypatch: pytest.MonkeyPatch, limit: int, code: ErrorCode) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # so that it is put back
    wide = png(190_000_000, 1, 0, b"")  # which Pillow by itself refuses; there are no pixels
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_pixel_limit(limit)
        error = refused(lambda: decode(wide, limit), code)
        assert ("--max-image-pixels" in error.message) == (code is ErrorCode.TOO_LARGE)
        for pixels in (201, 399):  # of which Pillow would warn
            assert "limit of 200" in refused(lambda: decode(png(pixels, 8, 0, b""), 200), ErrorCode.TOO_LARGE).message  # noqa: B023


def text_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("place", [33, -12], ids=["before", "behind"])
def test_too_much_text_in_a_png_is_called_that(place: int) -> None:
    data = save(sample())
    large = text_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 + 1)))
    many = text_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20))) * 65
    for chunks in (large, many):
        error = refused(lambda: decode(data[:place] + chunks + data[place:]), ErrorCode.TOO_LARGE)  # noqa: B023
        assert "text" in error.message and "damaged" not in error.message


def test_headers_without_a_picture() -> None:
    refused(lambda: probe(b""), ErrorCode.MEDIA_CORRUPT)
    refused(lambda: decode(b"\xff\xd8\xff\xe0 secret"), ErrorCode.MEDIA_CORRUPT)
    refused(lambda: probe(png(0, 8, 2, b"")), ErrorCode.MEDIA_CORRUPT)
