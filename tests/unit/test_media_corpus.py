"""The kinds of faults that are publicly known of servers like this one, as far as media are concerned.

`KINDS` says for each kind which tests hold it off; the tests of kinds that had none stand below.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import random
import struct
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.Image import Transpose

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.data_uri import parse_data_uri
from spmd_encoder.media.fetch import MediaFetcher
from spmd_encoder.media.image import FORMATS, HAS_AVIF, decode, probe
from spmd_encoder.media_flags import MediaConfig
from tests.harness.web import Exchange, Names, web
from tests.unit.test_media_image import LOSSLESS, refused, sample, save

ROOT = Path(__file__).parents[2]
HERE = "test_media_corpus.py"
CONTRACTS, WORLDS = "../contracts", "../distributed"

KINDS = {
    # One bad input harms more than itself.
    "a picture of one pixel, or of one row": ["test_media_image.py::test_small_and_thin"],
    "a picture that is not RGB": [f"{HERE}::test_every_mode", "test_media_image.py::test_other_colour_spaces"],
    "a size that nobody tried": [f"{HERE}::test_every_small_size", f"{HERE}::test_large_sizes"],
    "pictures at the same time": [f"{HERE}::test_good_and_bad_pictures_at_the_same_time"],
    "a good picture after a bad one": [f"{HERE}::test_good_and_bad_pictures_at_the_same_time"],
    "more pixels or bytes than there is memory": [
        "test_media_broken.py::test_pixel_limit_comes_from_the_header",
        "test_media_data_uri.py::test_limit_is_exact_and_named",
        f"{HERE}::test_small_files_that_unpack_to_much",
    ],
    # Wrong pixels and no error.
    "orientation is ignored": ["test_media_image.py::test_exif_orientation", f"{HERE}::test_orientation_elsewhere"],
    "damaged metadata count for more than the pixels": [
        "test_media_image.py::test_damaged_exif_is_no_reason_to_refuse",
        f"{HERE}::test_orientations_that_are_none",
    ],
    "transparent parts show what is hidden": [
        "test_media_image.py::test_transparency_is_composited_on_white",
        "test_media_image.py::test_grey_with_a_transparent_value",
        "test_media_image.py::test_deep_colour_with_a_transparent_value",
    ],
    "deep samples are clipped": ["test_media_image.py::test_deep_grey_is_scaled_not_clipped"],
    "CMYK with and without Adobe's mark": [f"{HERE}::test_cmyk_with_and_without_adobes_mark"],
    "lossy steps between file and model": ["test_media_image.py::test_every_format"],
    "another frame than the first": ["test_media_image.py::test_first_frame_of_several"],
    "files that end early or are damaged late": [
        "test_media_broken.py::test_truncated_at_every_cut",
        "test_media_broken.py::test_damaged_at_any_place",
        "test_media_broken.py::test_zeroed_second_data_chunk_is_corrupt",
    ],
    "foreign, corrupt and too large are the same error": ["test_media_broken.py::test_other_kinds_are_unsupported"],
    "the declared type is believed": [f"{HERE}::test_only_the_content_counts"],
    "items of one call disturb each other": [f"{HERE}::test_only_the_content_counts"],
    # Data URIs.
    "parameters of data URIs": ["test_media_data_uri.py::test_base64_with_any_header"],
    "data URIs without base64 or data": ["test_media_data_uri.py::test_refused_with_the_reason"],
    "lenient base64, or none, without words": ["test_media_data_uri.py::test_refused_with_the_reason"],
    "a limit that does not say its flag": ["test_media_data_uri.py::test_limit_is_exact_and_named"],
    # Fetching.
    "the server's own network is reached": [
        "test_media_fetch_rules.py::test_no_spelling_gets_inside",
        "test_media_fetch_rules.py::test_a_name_for_an_inner_address",
        "../property/test_addresses.py::test_inner_ipv4_in_every_spelling",
    ],
    "rules hold before redirects only": [
        "test_media_fetch_rules.py::test_every_hop_is_checked",
        "test_media_fetch_rules.py::test_allowed_domains_hold_for_redirects",
        "test_media_fetch_tls.py::test_from_http_to_https_but_not_back",
    ],
    "names that change between check and use": [
        "test_media_fetch_rules.py::test_the_address_that_was_checked_is_the_one_connected_to"
    ],
    "a failed fetch looks like a fault of the server, or like success": [
        "test_media_fetch.py::test_what_is_no_good_answer",
        "test_media_fetch.py::test_nobody_listens_or_there_is_no_such_name",
        "test_media_fetch.py::test_too_slow",
    ],
    "one URL many times at once": [f"{HERE}::test_one_url_many_times_at_once"],
    "old bytes for a URL": [f"{HERE}::test_a_url_whose_content_changes"],
    "files of the server": [
        "test_media_fetch_local.py::test_without_a_folder_files_are_refused",
        "test_media_fetch_local.py::test_what_is_refused",
        "test_media_fetch_local.py::test_links_may_lead_inside_but_not_outside",
    ],
    "endless or slow replies": [
        "test_media_fetch.py::test_more_than_the_limit",
        "test_media_fetch.py::test_too_slow",
        "test_media_fetch.py::test_no_more_connections_than_allowed_and_waiting_counts",
    ],
    # Numbers.
    "towers overflow in float16": ["test_weights.py::test_float16_is_refused_where_towers_overflow_in_it"],
    "rows that are not finite look like success": [
        "test_http_render.py::test_what_is_not_finite_is_the_items_failure",
        "test_http_embeddings.py::test_values_that_are_not_finite",
    ],
    "rows depend on the company in a batch": [
        f"{CONTRACTS}/test_family.py::test_a_batch_equals_its_pictures_in_any_order",
        f"{CONTRACTS}/test_family_audio.py::test_a_batch_equals_its_sounds_in_any_order",
        f"{CONTRACTS}/test_family_video.py::test_a_batch_equals_its_films_in_any_order",
    ],
    "rows are not the reference's": [
        f"{CONTRACTS}/test_family.py::test_a_picture_alone_equals_transformers",
        f"{CONTRACTS}/test_family_audio.py::test_a_sound_equals_transformers_and_keeps_its_promises",
        f"{CONTRACTS}/test_family_video.py::test_a_film_equals_transformers_and_keeps_its_promises",
        f"{CONTRACTS}/test_logits.py::test_logits_are_those_of_the_whole_model",
    ],
    "items of several kinds change places": [
        f"{WORLDS}/test_films.py::test_pictures_films_and_a_broken_film_in_one_request",
        f"{WORLDS}/test_families.py::test_all_outputs_in_any_company",
    ],
    # Sounds and films.
    "a small file becomes gigabytes": [
        "test_media_bounds.py::test_a_small_file_does_not_become_gigabytes",
        "test_media_bounds.py::test_frames_that_are_not_chosen_are_not_kept",
        "test_media_audio.py::test_the_limit_is_held_to_while_decoding",
    ],
    "one rate or one channel only": [
        "test_media_audio.py::test_every_format_gives_its_signal",
        "test_media_audio.py::test_channels_are_averaged",
        "test_media_resample.py::test_what_is_above_nyquist_does_not_come_back",
    ],
    "very short or empty sounds": [
        "test_media_audio.py::test_the_shortest_sounds",
        "test_media_audio.py::test_no_sample_is_corrupt",
        f"{CONTRACTS}/test_family_audio.py::test_every_length_is_encoded_or_refused_with_a_reason",
    ],
    "a film with broken frames fails, or falls short of a promise": [
        "test_media_video.py::test_of_a_film_that_was_cut_what_is_there_is_taken",
        "test_media_video.py::test_frames_that_are_broken_are_left_out",
        "test_media_video.py::test_a_film_of_which_nothing_decodes_is_corrupt",
        f"{WORLDS}/test_films.py::test_a_broken_film_fails_alone",
    ],
    "every frame of a long film is decoded": [
        "test_media_video.py::test_far_frames_cost_one_group_each",
        "test_media_video.py::test_limits_name_their_flags",
    ],
    "a request raises the operator's or the family's limit": [
        f"{CONTRACTS}/test_family_video.py::test_frames_are_chosen_within_the_film_and_the_limits",
        f"{WORLDS}/test_films.py::test_a_file_as_json",
        "test_media_video.py::test_limits_name_their_flags",
    ],
    "codes that cannot be decoded are found out late": [
        "test_capabilities.py::test_all_that_is_decoded_is_told",
        "test_media_video.py::test_codes_that_are_not_listed_are_unsupported",
        "test_media_audio.py::test_codes_that_are_not_listed_are_unsupported",
    ],
    "what is told of one film is another's": [
        f"{WORLDS}/test_films.py::test_pictures_films_and_a_broken_film_in_one_request"
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_tests(kind: str) -> None:
    assert KINDS[kind]
    for name in KINDS[kind]:
        file, _, function = name.partition("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _cannot_hold(format: str, mode: str) -> bool:
    try:
        save(Image.new(mode, (8, 8)), format)
    except (OSError, KeyError, ValueError):
        return True
    return False


MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "F",
)
HELD = [(format, mode) for format in FORMATS for mode in MODES if not _cannot_hold(format, mode)]


@pytest.mark.parametrize(("format", "mode"), HELD)
def test_every_mode(format: str, mode: str) -> None:
    data = save(Image.new(mode, (224, 224)), format, **LOSSLESS.get(format, {}))
    decoded = decode(data)
    assert (decoded.mode, decoded.size) == ("RGB", (224, 224))
    assert all(low == high for low, high in decoded.getextrema())


def test_every_small_size() -> None:
    for width in range(1, 65):
        for height in range(1, 65):
            data = save(Image.new("L", (width, height), 7), "BMP")
            assert probe(data)[1:3] == decode(data).size == (width, height)


@pytest.mark.parametrize("format", FORMATS)
def test_large_sizes(format: str) -> None:
    choose = random.Random(11)
    for _ in range(4):
        size = tuple(sorted((choose.randint(1, 64), choose.randint(65, 4096)), key=lambda _: choose.random()))
        data = save(Image.new("RGB", size, (9, 9, 9)), format)
        assert probe(data)[1:3] == decode(data).size == size


def test_good_and_bad_pictures_at_the_same_time() -> None:
    """Threads and order change nothing, and what was refused leaves nothing behind."""
    files = [save(sample(24 + n, 16), format) for n, format in enumerate(FORMATS)]
    files += [data[: len(data) // 2] for data in files] + [b"", b"<svg/>", save(Image.new("L", (300, 300)))]

    def outcome(data: bytes) -> object:
        try:
            return decode(data, 60_000).tobytes()
        except EncoderError as error:
            return error.code, error.message

    alone = [outcome(data) for data in files]
    order = [index for index in range(len(files)) for _ in range(20)]
    random.Random(2).shuffle(order)
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda index: outcome(files[index]), order))
    assert together == [alone[index] for index in order]


def _png_with(name: bytes, data: bytes) -> bytes:
    chunk = struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    whole = save(sample())
    return whole[:33] + chunk + whole[33:]


@pytest.mark.parametrize(
    "data",
    [
        _png_with(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**26))),
        _png_with(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(bytes(2**26))),
        _png_with(b"iCCP", b"profile\0\0" + zlib.compress(bytes(2**26))),
    ],
    ids=["zTXt", "iTXt", "iCCP"],
)
def test_small_files_that_unpack_to_much(data: bytes) -> None:
    """Metadata that unpack to 64 MiB: refused, or passed over, but never unpacked and never with other pixels."""
    assert len(data) < 2**17
    tracemalloc.start()
    try:
        assert decode(data).tobytes() == sample().tobytes()
    except EncoderError as error:
        assert error.code is ErrorCode.TOO_LARGE
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**24


UNDO = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_90,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_270,
}


def _corners_are_right(decoded: Image.Image) -> bool:
    return decoded.size == (24, 16) and all(
        np.abs(np.subtract(decoded.getpixel(xy), sample().getpixel(xy))).max() < 40
        for xy in [(1, 1), (22, 1), (1, 14), (22, 14)]
    )


@pytest.mark.parametrize("format", ["MPO", *(["AVIF"] if HAS_AVIF else [])])
@pytest.mark.parametrize("turn", UNDO)
def test_orientation_elsewhere(format: str, turn: int) -> None:
    stored = sample().transpose(UNDO[turn])
    exif = Image.Exif()
    exif[0x0112] = turn
    options = {"save_all": True, "append_images": [sample()]} if format == "MPO" else {}
    assert _corners_are_right(decode(save(stored, format, exif=exif, **options)))


@pytest.mark.parametrize("turn", [0, 9, 255, 65535])
def test_orientations_that_are_none(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    for format in ("JPEG", "PNG", "WEBP", "TIFF"):
        assert _corners_are_right(decode(save(sample(), format, exif=exif)))


def test_cmyk_with_and_without_adobes_mark() -> None:
    """Both are read as Adobe writes them, which is what Pillow and browsers do; profiles are not applied."""
    with_mark = save(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG")
    start = with_mark.index(b"\xff\xee")
    length = int.from_bytes(with_mark[start + 2 : start + 4], "big")
    without = with_mark[:start] + with_mark[start + 2 + length :]
    for data in (with_mark, without):
        red, green, blue = decode(data).getpixel((5, 5))
        assert red > 245
        assert max(green, blue) < 10


def test_only_the_content_counts() -> None:
    """64 items in one call, most with a false type, each with its own outcome."""
    kinds = ["image/png", "image/jpeg", "text/html", "", "application/pdf;charset=utf-8", "image/svg+xml"]
    foreign = [b"<html></html>", b"<svg/>", b"%PDF-1.7", b"\0\0\0\x18ftypheic"]
    for index in range(64):
        data = foreign[index // 16] if index % 16 == 5 else save(sample(8 + index, 8), FORMATS[index % len(FORMATS)])
        uri = f"data:{kinds[index % len(kinds)]};base64,{base64.b64encode(data).decode()}"
        got = parse_data_uri(uri).data
        if data in foreign:
            refused(lambda: decode(got), ErrorCode.MEDIA_UNSUPPORTED)  # noqa: B023
        else:
            assert decode(got).size == (8 + index, 8)


def fetcher() -> MediaFetcher:
    return MediaFetcher(MediaConfig(allow_private_media_hosts=True), resolve=Names(a_example=["127.0.0.1"]))


def no_account(num_bytes: int) -> None:
    pass


async def test_one_url_many_times_at_once() -> None:
    """It is fetched once, for as long as anybody waits: whoever leaves takes nobody along."""
    go = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await go.wait()
        await exchange.reply(b"picture")

    async with web(answer) as server:
        media, url = fetcher(), f"http://a.example:{server.port}/x"
        jobs = [asyncio.create_task(media.fetch(url, reserve=no_account)) for _ in range(32)]
        await server.until(lambda: len(server.seen) == 1)
        for job in jobs[::3]:
            job.cancel()
        go.set()
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        await server.until(lambda: server.open == 0)
        assert len(server.seen) == 1
    for index, outcome in enumerate(outcomes):
        assert isinstance(outcome, asyncio.CancelledError) if index % 3 == 0 else outcome == b"picture"


async def test_a_url_whose_content_changes() -> None:
    async with web(
        lambda exchange: exchange.reply(b"%d" % len(server.seen), "200 OK", "Cache-Control: max-age=9")
    ) as server:
        media, url = fetcher(), f"http://a.example:{server.port}/x"
        assert [await media.fetch(url, reserve=no_account) for _ in range(3)] == [b"1", b"2", b"3"]
