"""A list of pictures in one byte string."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import FilmInfo, FilmLimits
from spmd_encoder.media.frames import MAX_FILES, MAX_FPS, MIN_FPS, is_packed, pack, unpack
from spmd_encoder.media.video import decode, probe

LIMITS = FilmLimits(max_pixels=10**4, max_seconds=100, max_chosen=50, max_walked=60, max_bytes=2**20)


def png(grey: int, size: tuple[int, int] = (40, 30), format: str = "PNG", turn: int = 1) -> bytes:
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = turn
    Image.new("RGB", size, (grey, 0, 255 - grey)).save(out, format, exif=exif)
    return out.getvalue()


def refused(code: ErrorCode, action: Callable[[], object]) -> str:
    with pytest.raises(EncoderError) as caught:
        action()
    assert caught.value.code is code
    return caught.value.message


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20), st.floats(MIN_FPS, MAX_FPS))
def test_what_is_packed_comes_back(files: list[bytes], fps: float) -> None:
    data = pack(files, fps)
    clip = unpack(data)
    assert is_packed(data) and clip.fps == fps and [bytes(file) for file in clip.files] == files


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_any_bytes_are_a_clip_or_refused(files: list[bytes], data: st.DataObject) -> None:
    broken = bytearray(pack(files, 2.0))
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(8, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(broken[: data.draw(st.integers(0, len(broken)))])
    try:
        clip = unpack(cut)
    except EncoderError as error:
        assert error.code in (ErrorCode.MEDIA_CORRUPT, ErrorCode.TOO_LARGE)
    else:
        assert sum(map(len, clip.files)) < len(cut)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_rates_that_make_no_sense(fps: float) -> None:
    refused(ErrorCode.INVALID_REQUEST, lambda: pack([b"x"], fps))
    data = bytearray(pack([b"x"], 2.0))
    data[8:16] = np.float64(fps).tobytes()
    refused(ErrorCode.MEDIA_CORRUPT, lambda: unpack(bytes(data)))


def test_an_empty_list() -> None:
    refused(ErrorCode.INVALID_REQUEST, lambda: pack([], 2.0))
    refused(ErrorCode.MEDIA_CORRUPT, lambda: unpack(pack([b"x"], 2.0)[:16] + bytes(4)))


def test_a_clip_is_a_film() -> None:
    data = pack([png(10 * n) for n in range(8)], 4.0)
    assert probe(data) == ("FRAMES", 40, 30, 2.0, 8)
    seen: list[FilmInfo] = []

    def choose(info: FilmInfo) -> tuple[int, ...]:
        seen.append(info)
        return (0, 3, 3, 7)

    got = decode(data, choose, LIMITS)
    assert seen == [got.info] == [FilmInfo(num_frames=8, fps=4.0, seconds=2.0, width=40, height=30)]
    assert got.times == (0.0, 0.75, 0.75, 1.75) and got.indices == (0, 3, 3, 7)
    assert [frame[0, 0, 0] for frame in got.frames] == [0, 30, 30, 70]
    assert got.frames[0].shape == (30, 40, 3) and got.frames[0].flags.writeable


def test_transparent_frames_are_laid_on_what_the_server_says() -> None:
    out = io.BytesIO()
    Image.new("RGBA", (8, 8), (10, 20, 30, 0)).save(out, "PNG")
    data = pack([out.getvalue()], 2.0)
    for background, value in (("white", 255), ("black", 0), ("drop", 10)):
        assert decode(data, lambda info: (0,), LIMITS, background).frames[0][0, 0, 0] == value  # type: ignore[arg-type]


def test_sizes_are_compared_upright() -> None:
    turned = png(5, (30, 40), "JPEG", turn=6)
    decode(pack([png(1), turned], 2.0), lambda info: (0, 1), LIMITS)
    message = refused(
        ErrorCode.MEDIA_CORRUPT, lambda: decode(pack([png(1), png(1, (30, 40))], 2.0), lambda info: (0, 1), LIMITS)
    )
    assert "frame 1 has 30 x 40 pixels and frame 0 40 x 30" in message


def test_a_broken_picture_is_named() -> None:
    data = pack([png(1), png(2), png(3)[:60]], 2.0)
    assert "frame 2: " in refused(ErrorCode.MEDIA_CORRUPT, lambda: decode(data, lambda info: (0, 2), LIMITS))
    data = pack([b"<svg/>", png(2)], 2.0)
    assert "frame 0: " in refused(ErrorCode.MEDIA_UNSUPPORTED, lambda: probe(data))
    assert "frame 0: " in refused(ErrorCode.MEDIA_UNSUPPORTED, lambda: decode(data, lambda info: (1,), LIMITS))


def test_limits() -> None:
    message = refused(ErrorCode.TOO_LARGE, lambda: probe(pack([b""] * (MAX_FILES + 1), 2.0)))
    assert f"limit of {MAX_FILES}" in message
    data = pack([png(1, (101, 100))], 2.0)
    assert "--max-image-pixels" in refused(ErrorCode.TOO_LARGE, lambda: decode(data, lambda info: (0,), LIMITS))
    data = pack([png(1)] * 61, 2.0)
    assert "--max-video-frames-decoded" in refused(ErrorCode.TOO_LARGE, lambda: decode(data, lambda i: (0,), LIMITS))
    data = pack([png(1)] * 60, 2.0)
    message = refused(ErrorCode.TOO_LARGE, lambda: decode(data, lambda i: range(51), LIMITS))
    assert "--max-video-frames)" in message
    data = pack([png(1)] * 2, 0.01)
    assert "--max-video-seconds" in refused(ErrorCode.TOO_LARGE, lambda: decode(data, lambda i: (0,), LIMITS))
