"""Films against the frames that they were made of."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import FilmInfo, FilmLimits
from spmd_encoder.media.video import decode, probe
from tests.harness.media import film, sound, tone

LIMITS = FilmLimits(max_pixels=10**7, max_seconds=7200, max_chosen=768, max_walked=20_000, max_bytes=2**28)
CODES: dict[str, tuple[str, str, dict[str, str]]] = {
    "H.264": ("mp4", "libx264", {"bf": "3", "g": "12"}),
    "H.264, open GOPs": ("mp4", "libx264", {"x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0:scenecut=0"}),
    "H.264 in Matroska": ("matroska", "libx264", {"bf": "3", "g": "12"}),
    "H.264 in MOV": ("mov", "libx264", {"g": "12"}),
    "H.265": (
        "mp4",
        "libx265",
        {"x265-params": "log-level=none:pools=none:frame-threads=1:keyint=12:bframes=3:open-gop=1"},
    ),
    "VP8": ("webm", "libvpx", {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16", "b": "400k"}),
    "VP9": ("webm", "libvpx-vp9", {"g": "12"}),
    "AV1": ("webm", "libsvtav1", {"g": "12", "svtav1-params": "lp=1"}),
    "AV1 in MP4": ("mp4", "libsvtav1", {"g": "12", "svtav1-params": "lp=1"}),
    "one key frame": ("mp4", "libx264", {"g": "1000", "sc_threshold": "0"}),
    "fragments": ("mp4", "libx264", {"g": "12"}),
}
Picture = npt.NDArray[np.uint8]


def picture(index: int, width: int = 64, height: int = 48) -> Picture:
    """Of a colour that belongs to this index alone."""
    colour = (40 + index * 37 % 160, 40 + index * 91 % 160, 200 - index * 13 % 160)
    return np.full((height, width, 3), colour, np.uint8)


def pictures(count: int, **size: int) -> list[Picture]:
    return [picture(index, **size) for index in range(count)]


def made(name: str, count: int = 60) -> bytes:
    container, codec, options = CODES[name]
    muxer = {"movflags": "frag_keyframe+empty_moov"} if name == "fragments" else {}
    return film(container, codec, pictures(count), options=options, muxer=muxer)


def everything(info: FilmInfo) -> Sequence[int]:
    return range(info.num_frames)


def chosen(*indices: int) -> Callable[[FilmInfo], Sequence[int]]:
    return lambda info: indices


def off_by(got: Picture, wanted: Picture) -> int:
    return int(np.abs(got[8, 8].astype(int) - wanted[8, 8]).max())


def refused(code: ErrorCode, action: Callable[[], object]) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        action()
    assert caught.value.code is code
    return caught.value


@pytest.fixture(scope="module", params=sorted(CODES))
def coded(request: pytest.FixtureRequest) -> tuple[str, bytes]:
    return request.param, made(request.param)


def test_every_frame_of_every_code(coded: tuple[str, bytes]) -> None:
    name, data = coded
    got = decode(data, everything, LIMITS)
    assert got.info == FilmInfo(num_frames=60, fps=25.0, seconds=2.4, width=64, height=48)
    assert got.indices == tuple(range(60))
    assert got.times == pytest.approx([index / 25 for index in range(60)], abs=1e-3)
    for index, frame in enumerate(got.frames):
        assert frame.shape == (48, 64, 3) and frame.dtype == np.uint8
        assert off_by(frame, picture(index)) <= 8
    header = probe(data)
    assert header[1:3] == (64, 48)
    assert header.seconds == pytest.approx(0 if name == "fragments" else 2.4, abs=0.05)


@pytest.mark.parametrize("indices", [(0,), (59,), (0, 59), (5, 6, 7, 40), (11, 12, 13), (3, 3, 30), (29,)])
def test_chosen_frames(coded: tuple[str, bytes], indices: tuple[int, ...]) -> None:
    got = decode(coded[1], chosen(*indices), LIMITS)
    assert got.indices == indices
    for index, frame in zip(indices, got.frames, strict=True):
        assert off_by(frame, picture(index)) <= 8


def test_far_frames_cost_one_group_each() -> None:
    data = made("H.264")  # a key frame every 12
    decode(data, chosen(5, 55), replace(LIMITS, max_walked=30))
    error = refused(ErrorCode.TOO_LARGE, lambda: decode(data, everything, replace(LIMITS, max_walked=30)))
    assert "--max-video-frames-decoded" in error.message
    alone = made("one key frame")
    refused(ErrorCode.TOO_LARGE, lambda: decode(alone, chosen(55), replace(LIMITS, max_walked=30)))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_changing_rate_is_sampled_by_time(container: str) -> None:
    """Ten frames in the first second, one for the next nine, ten in the last."""
    times = [*range(0, 1000, 100), 1000, *range(10_000, 11_000, 100)]
    data = film(container, "libx264", pictures(21), times=times, time_base=Fraction(1, 1000), options={"bf": "0"})
    got = decode(data, everything, LIMITS)
    assert got.info.num_frames == 21
    assert got.info.fps == pytest.approx(20 / 10.9)
    for index, (time, frame) in enumerate(zip(got.times, got.frames, strict=True)):
        moment = (index + 0.25) / got.info.fps
        shown = max(place for place, start in enumerate(times) if start / 1000 <= moment)
        assert time == pytest.approx(times[shown] / 1000)
        assert off_by(frame, picture(shown)) <= 8
    assert got.frames[5] is got.frames[6]


def test_times_that_are_rounded_mean_the_same_frames() -> None:
    """Matroska has milliseconds: 33, 67, 100."""
    data = film("matroska", "libx264", pictures(300), time_base=Fraction(1, 30))
    got = decode(data, everything, LIMITS)
    assert got.info.fps == 30.0
    assert len({id(frame) for frame in got.frames}) == 300


def test_a_film_of_one_frame() -> None:
    for name in ("H.264", "VP9", "AV1"):
        got = decode(made(name, 1), everything, LIMITS)
        assert got.info.num_frames == 1 and got.times == (0.0,)
        assert got.info.fps > 0 and off_by(got.frames[0], picture(0)) <= 8


def test_a_late_start_and_negative_times_do_not_count() -> None:
    for container, start, count in (("matroska", 5000, 10), ("matroska", -5, 10), ("mp4", -3, 7), ("mp4", 5000, 10)):
        times = range(start, start + 10)
        data = film(container, "libx264", pictures(10), times=times, options={"bf": "0"})
        got = decode(data, everything, LIMITS)
        assert got.times == pytest.approx([index / 25 for index in range(count)], abs=1e-3)
        assert off_by(got.frames[0], picture(10 - count)) <= 8


def box_at(data: bytes, kind: bytes) -> int:
    """Where its content begins."""
    return data.index(kind) + 4


def test_an_edit_list_cuts_away_the_beginning() -> None:
    """A phone's cut: what comes before the edit is only decoded."""
    data = bytearray(film("mp4", "libx264", pictures(50), options={"g": "50", "bf": "0", "sc_threshold": "0"}))
    at = box_at(data, b"elst")
    assert struct.unpack_from(">I", data, at + 4) == (1,)
    _, media_time = struct.unpack_from(">Ii", data, at + 8)
    struct.pack_into(">Ii", data, at + 8, 1600, media_time + 10 * 512)  # 40 of 50 frames of 512 ticks
    got = decode(bytes(data), everything, LIMITS)
    assert got.info.num_frames == 40
    assert got.times[0] == 0 and off_by(got.frames[0], picture(10)) <= 8


MATRICES = {
    "upright": ((1, 0, 0, 1), lambda p: p),
    "clockwise": ((0, 1, -1, 0), lambda p: np.rot90(p, -1)),
    "half": ((-1, 0, 0, -1), lambda p: np.rot90(p, 2)),
    "counterclockwise": ((0, -1, 1, 0), lambda p: np.rot90(p)),
    "mirrored": ((-1, 0, 0, 1), lambda p: p[:, ::-1]),
    "upside down": ((1, 0, 0, -1), lambda p: p[::-1]),
    "transposed": ((0, 1, 1, 0), lambda p: p.swapaxes(0, 1)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_frames_come_upright(name: str) -> None:
    matrix, turned = MATRICES[name]
    corners = np.full((48, 64, 3), 128, np.uint8)
    corners[:24, :32], corners[:24, 32:], corners[24:, :32] = (220, 30, 30), (30, 220, 30), (30, 30, 220)
    data = bytearray(film("mp4", "libx264", [corners] * 3, options={"crf": "5"}))
    a, b, c, d = (value << 16 for value in matrix)
    struct.pack_into(">5i", data, box_at(data, b"tkhd") + 40, a, b, 0, c, d)
    got = decode(bytes(data), chosen(1), LIMITS)
    wanted = turned(corners)
    assert got.frames[0].shape == wanted.shape == (got.info.height, got.info.width, 3)
    assert probe(bytes(data))[1:3] == (got.info.width, got.info.height)
    assert np.abs(got.frames[0].astype(int) - wanted).mean() < 6


COLOURS = {  # matrix and range in the numbers of H.273
    "BT.601": (5, 1),
    "BT.709": (1, 1),
    "BT.709, full range": (1, 2),
    "BT.601, full range": (6, 2),
    "BT.2020": (9, 1),
    "nothing said": (2, 0),
}


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize("pixels", ["yuv420p", "yuv444p", "yuv420p10le"])
def test_colours_are_what_the_stream_says(name: str, pixels: str) -> None:
    matrix, full = COLOURS[name]

    def set_up(context: Any) -> None:
        context.colorspace, context.color_range = matrix, full

    data = film("mp4", "libx264", pictures(8), pixels=pixels, set_up=set_up, options={"crf": "3"})
    got = decode(data, everything, LIMITS)
    for index, frame in enumerate(got.frames):
        assert off_by(frame, picture(index)) <= 5


@pytest.mark.parametrize("size", [(64, 48), (63, 47), (2, 2), (17, 130), (1, 3)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    width, height = size
    data = film("matroska", "libvpx-vp9", pictures(3, width=width, height=height))
    got = decode(data, everything, LIMITS)
    assert (got.info.width, got.info.height) == size == probe(data)[1:3]
    assert all(frame.shape == (height, width, 3) for frame in got.frames)


def test_alpha_is_passed_over() -> None:
    data = film("webm", "libvpx-vp9", pictures(4), pixels="yuva420p", options={"auto-alt-ref": "0"})
    got = decode(data, everything, LIMITS)
    assert max(off_by(frame, picture(index)) for index, frame in enumerate(got.frames)) <= 8


def header_first(data: bytes) -> bytes:
    """An MP4 with its movie box before its frames, as for streaming."""
    moov, mdat = data.index(b"moov") - 4, data.index(b"mdat") - 4
    assert mdat < moov
    header = bytearray(data[moov:])
    table = header.index(b"stco") + 8
    (count,) = struct.unpack_from(">I", header, table)
    for at in range(table + 4, table + 4 + 4 * count, 4):
        struct.pack_into(">I", header, at, struct.unpack_from(">I", header, at)[0] + len(header))
    return data[:mdat] + bytes(header) + data[mdat:moov]


@pytest.mark.parametrize("name", ["H.264", "H.264 in Matroska", "VP9", "fragments"])
def test_of_a_film_that_was_cut_what_is_there_is_taken(name: str) -> None:
    container, codec, options = CODES[name]
    noise = np.random.default_rng(3).integers(0, 255, (40, 48, 64, 3), np.uint8)
    muxer = {"movflags": "frag_keyframe+empty_moov"} if name == "fragments" else {}
    data = film(container, codec, noise, options=options, muxer=muxer)
    data = header_first(data) if name == "H.264" else data
    got = decode(data[: len(data) * 6 // 10], everything, LIMITS)
    assert 15 <= got.info.num_frames <= 30
    assert got.info.num_frames - 2 <= len(got.frames) <= got.info.num_frames
    assert got.indices == tuple(range(len(got.frames)))
    whole = decode(data, everything, LIMITS)
    assert np.array_equal(got.frames[10], whole.frames[10])


def test_frames_that_are_broken_are_left_out() -> None:
    noise = np.random.default_rng(3).integers(0, 255, (40, 48, 64, 3), np.uint8)
    data = bytearray(film("mp4", "libx264", noise, options={"g": "10", "bf": "0"}))
    start, size = data.index(b"mdat") + 4, len(data)
    middle = start + (size - start) // 2
    data[middle : middle + 600] = bytes(600)
    got = decode(bytes(data), everything, LIMITS)
    assert got.info.num_frames == 40
    assert 25 <= len(got.frames) < 40
    assert got.indices[:10] == tuple(range(10)) and got.indices[-1] == 39


def test_a_film_of_which_nothing_decodes_is_corrupt() -> None:
    data = bytearray(made("H.264"))
    start = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4
    data[start:end] = bytes(end - start)
    assert "no frame" in refused(ErrorCode.MEDIA_CORRUPT, lambda: decode(bytes(data), everything, LIMITS)).message


def test_the_default_track_of_a_film_with_sound() -> None:
    data = film("mp4", "libx264", pictures(10), with_sound=True)
    assert decode(data, everything, LIMITS).info.num_frames == 10


def test_sound_alone_is_no_film() -> None:
    signal = tone(48_000, 48_000)
    for data in (sound("ipod", "aac", 48_000, signal), sound("webm", "libopus", 48_000, signal)):
        for action in (lambda data=data: probe(data), lambda data=data: decode(data, everything, LIMITS)):
            assert "moving pictures" in refused(ErrorCode.MEDIA_UNSUPPORTED, action).message


def test_codes_that_are_not_listed_are_unsupported() -> None:
    data = film("mp4", "mpeg4", pictures(3))
    message = refused(ErrorCode.MEDIA_UNSUPPORTED, lambda: decode(data, everything, LIMITS)).message
    assert "mpeg4" in message and "h264" in message


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"max_pixels": 64 * 48 - 1}, "--max-image-pixels"),
        ({"max_seconds": 2.0}, "--max-video-seconds"),
        ({"max_chosen": 59}, "--max-video-frames"),
        ({"max_walked": 59}, "--max-video-frames-decoded"),
        ({"max_bytes": 60 * 64 * 48 * 3 - 1}, "--max-video-bytes-decoded"),
    ],
)
def test_limits_name_their_flags(limits: dict[str, int], flag: str) -> None:
    data = made("H.264")
    size = 64 * 48
    enough = FilmLimits(max_pixels=size, max_seconds=2.4, max_chosen=60, max_walked=60, max_bytes=60 * size * 3)
    decode(data, everything, enough)
    error = refused(ErrorCode.TOO_LARGE, lambda: decode(data, everything, replace(LIMITS, **limits)))
    assert f"({flag})" in error.message


def test_probing_refuses_large_frames() -> None:
    data = made("H.264")
    probe(data, 64 * 48)
    assert "--max-image-pixels" in refused(ErrorCode.TOO_LARGE, lambda: probe(data, 64 * 48 - 1)).message


@pytest.mark.parametrize("kind", [b"mvhd", b"mdhd", b"tkhd"])
def test_forged_lengths_change_nothing_but_the_price(kind: bytes) -> None:
    data = bytearray(made("H.264"))
    at = box_at(data, kind) + (20 if kind == b"tkhd" else 16)
    struct.pack_into(">I", data, at, 0xFFFFFFF0)
    got = decode(bytes(data), everything, LIMITS)
    assert (got.info.num_frames, got.info.seconds) == (60, pytest.approx(2.4, abs=0.1))


def test_forged_sizes_are_found_out() -> None:
    """The header says 16 x 16 where the frames are of 64 x 48."""
    data = bytearray(made("H.264"))
    struct.pack_into(">HH", data, data.rindex(b"avc1") + 4 + 24, 16, 16)
    assert probe(bytes(data))[1:3] == (16, 16)
    got = decode(bytes(data), chosen(3), LIMITS)
    assert got.frames[0].shape == (48, 64, 3)
    refused(ErrorCode.TOO_LARGE, lambda: decode(bytes(data), chosen(3), replace(LIMITS, max_pixels=64 * 48 - 1)))


@pytest.mark.parametrize("indices", [(), (3, 2), (-1,), (60,)])
def test_indices_outside_the_film_are_the_choosers_fault(indices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        decode(made("H.264"), chosen(*indices), LIMITS)


def test_what_the_chooser_raises_is_passed_on() -> None:
    def choose(info: FilmInfo) -> Sequence[int]:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "no")

    refused(ErrorCode.INVALID_REQUEST, lambda: decode(made("H.264"), choose, LIMITS))
