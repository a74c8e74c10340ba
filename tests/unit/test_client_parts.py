"""The client's pure parts: safetensors, chunks, retries, sources, replies."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from spmd_encoder.client import BadReplyError, BusyError, EncoderClientError, ItemError, RefusedError
from spmd_encoder.client.chunks import ChunkLimits, chunked
from spmd_encoder.client.reply import SAFETENSORS, Reply, json_of, results_of
from spmd_encoder.client.retry import RetryPolicy, retry_after_s
from spmd_encoder.client.safetensors import Tensor, parse, write
from spmd_encoder.client.sources import source_of

# -- safetensors


def body_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


arrays = st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4).map(
    lambda shapes: {str(i): np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate(shapes)}
)


@given(arrays, st.sampled_from(["float32", "float16", "float64"]), st.text(max_size=20))
def test_what_the_library_writes_is_read(given_arrays: dict[str, Any], dtype: str, text: str) -> None:
    cast = {name: array.astype(dtype) for name, array in given_arrays.items()}
    tensors, metadata = parse(safetensors.numpy.save(cast, {"response": text}))
    assert metadata == {"response": text}
    assert tensors.keys() == cast.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (dtype, cast[name].shape)
        assert bytes(tensor.data) == cast[name].tobytes()


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    values = torch.linspace(-2, 2, 6).reshape(2, 3)
    tensors = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        raw = values.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
        tensors[f"photos/{name} ü.jpg"] = Tensor(name, (2, 3), raw)
    write(tmp_path / "a.safetensors", tensors, {"model": "m"})
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, values.to(tensor.dtype)), name
        assert str(tensor.dtype) == f"torch.{tensors[name].dtype}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@given(st.binary(max_size=200))
@example(b"")
@example(struct.pack("<Q", 2**63))
@example(struct.pack("<Q", 0))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadReplyError):
        parse(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(
    st.sampled_from(["0", "1", "__metadata__"]),
    json_values
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "I64", "BF16"]),
            "shape": st.lists(st.integers(-3, 2**70), max_size=4),
            "data_offsets": st.tuples(st.integers(-9, 40), st.integers(-9, 40)),
        }
    ),
)


@given(headers, st.binary(max_size=40))
def test_any_header_is_read_or_refused(header: Any, data: bytes) -> None:
    try:
        tensors, _ = parse(body_of(header, data))
    except BadReplyError:
        return
    assert sum(len(tensor.data) for tensor in tensors.values()) == len(data)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"\0" * 7, "7 bytes are too few"),
        (body_of({}, length=3), "larger than the body"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "larger than the body"),
        (body_of(b"[]"), "not as it should be"),
        (body_of(b"{"), "not as it should be"),
        (body_of(b"\xff\xfe"), "not as it should be"),
        (body_of(b'{"a":' * 5000 + b"1" + b"}" * 5000), "not as it should be"),
        (body_of({"0": {**entry(), "more": 1}}, b"1234"), "not as it should be"),
        (body_of({"0": entry(shape=[2**40, 2**40])}, b"1234"), "does not fit"),
        (body_of({"0": entry(shape=[-1, -1])}, b"1234"), "does not fit"),
        (body_of({"0": entry(offsets=[0, 8])}, b"1234"), "ends outside"),
        (body_of({"0": entry(offsets=[-4, 0])}, b"1234"), "ends outside"),
        (body_of({"0": entry(offsets=[4, 0])}, b"1234"), "overlaps"),
        (body_of({"0": entry(), "1": entry()}, b"1234"), "overlaps"),
        (body_of({"0": entry(offsets=[4, 8])}, b"12345678"), "hole"),
        (body_of({"0": entry()}, b"12345"), "1 bytes at the end"),
        (body_of({"0": entry("I32")}, b"1234"), "no float type"),
        (body_of({"__metadata__": {"a": 1}}), "not as it should be"),
    ],
)
def test_damage_is_named(body: bytes, why: str) -> None:
    with pytest.raises(BadReplyError, match=why):
        parse(body)


# -- chunks

pictures = st.lists(st.binary(min_size=1, max_size=30) | st.sampled_from(["https://a/b", "data:,x"]), max_size=40)


@given(pictures, st.integers(1, 6), st.integers(1, 60))
def test_chunks(images: list[bytes | str], items: int, num_bytes: int) -> None:
    chunks = list(chunked(images, ChunkLimits(items, num_bytes)))
    assert [source.index for chunk in chunks for source in chunk] == list(range(len(images)))
    for chunk in chunks:
        assert 1 <= len(chunk) <= items
        assert len(chunk) == 1 or sum(source.size_bytes for source in chunk) <= num_bytes
        assert len({source.url is None for source in chunk}) == 1
    for before, after in itertools.pairwise(chunks):
        together = sum(source.size_bytes for source in [*before, after[0]])
        alike = (before[0].url is None) == (after[0].url is None)
        assert len(before) == items or together > num_bytes or not alike, "no chunk ends early"


# -- retries


@given(st.floats(0, 100), st.integers(0, 8), st.none() | st.floats(0, 1e6), st.integers())
def test_pauses_are_bounded(now: float, used: int, wish: float | None, seed: int) -> None:
    policy = RetryPolicy(8, 100.0, random.Random(seed), used)
    pause = policy.pause_s(now, wish)
    if pause is None:
        assert used == 8 or now + (37.5 if wish else 5.0) >= 100.0
        assert policy.used == used
    else:
        assert now + pause < 100
        assert policy.used == used + 1
        if wish is None:
            assert 0.05 <= pause <= 5.0
        else:
            assert min(wish, 30.0) <= pause <= 37.5


def test_pauses_grow_and_end() -> None:
    policy = RetryPolicy(7, 1000.0, random.Random(1))
    pauses = [policy.pause_s(0.0, None) for _ in range(8)]
    assert pauses[-1] is None
    for index, pause in enumerate(pauses[:-1]):
        assert pause is not None
        assert 0.05 * 2**index <= pause <= 0.1 * 2**index or pause >= 2.5


NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 3),
        (" 120 ", 120),
        ("0", 0),
        ("9" * 400, 999_999_999),
        ("Mon, 30 Nov 2026 12:00:07 GMT", 7),
        ("Mon, 30 Nov 2026 12:00:07 -0000", 7),
        ("Mon, 30 Nov 2026 14:00:07 +0200", 7),
        ("Mon, 30 Nov 2020 12:00:07 GMT", 0),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("soon", None),
        ("Mon, 99 Nov 2026 12:00:07 GMT", None),
        ("²", None),
    ],
)
def test_retry_after(text: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": text}, NOW) == seconds


@given(st.text(max_size=40))
def test_any_retry_after_is_harmless(text: str) -> None:
    seconds = retry_after_s({"retry-after": text}, NOW)
    assert seconds is None or seconds >= 0


def test_no_retry_after() -> None:
    assert retry_after_s({}) is None
    soon = (datetime.now(UTC) + timedelta(seconds=90)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert 60 < (retry_after_s({"retry-after": soon}) or 0) <= 90


# -- sources


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_a_pil_picture_is_sent_as_it_is(mode: str) -> None:
    image = Image.effect_noise((20, 30), 90).convert("I;16" if mode == "I;16" else mode)
    sent = Image.open(io.BytesIO(source_of(image, 0).load()))
    assert (sent.format, sent.size) == ("PNG", image.size)
    assert np.array_equal(np.asarray(sent.convert(mode)), np.asarray(image))


def test_a_pil_picture_keeps_its_orientation() -> None:
    out = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (20, 30)).save(out, "JPEG", exif=exif)
    sent = Image.open(io.BytesIO(source_of(Image.open(out), 0).load()))
    assert sent.getexif()[ExifTags.Base.Orientation] == 6


@pytest.mark.parametrize("mode", ["CMYK", "HSV", "F"])
def test_a_mode_that_png_lacks_is_the_pictures_own_error(mode: str) -> None:
    with pytest.raises(ItemError, match=r"images\[4\]: it cannot be written as PNG .*to RGB \(UNREADABLE\)"):
        source_of(Image.new(mode, (4, 4)), 4).load()


def test_a_path_that_no_file_can_have() -> None:
    with pytest.raises(ItemError, match="UNREADABLE"):
        source_of("a\0b", 0).load()


@pytest.mark.parametrize("text", ["http://h/a", "HTTPS://h/a", "data:,x", "DATA:image/png;base64,AA=="])
def test_urls(text: str) -> None:
    source = source_of(text, 0)
    assert source.url == text
    assert source.name == ("images[0]" if text[:4].lower() == "data" else text)


# -- replies

GOOD = {"index": 0, "status": "ok", "shape": [1], "dtype": "float32", "grid": None, "num_tokens": 1, "digest": "d"}


def reply(response: Any, tensors: dict[str, Any], data: bytes = b"1234") -> Reply:
    body = body_of({"__metadata__": {"response": json.dumps(response)}, **tensors}, data)
    return Reply(200, {"content-type": f"{SAFETENSORS}; x=y"}, body)


SOURCE = source_of(b"x", 0)


def test_a_good_reply() -> None:
    (result,) = results_of(reply({"data": [GOOD], "new": 1}, {"0": entry()}), [SOURCE], "numpy")
    assert (result.shape, result.data, result.digest) == ((1,), b"1234", "d")


@pytest.mark.parametrize(
    "answer",
    [
        reply({"data": [GOOD]}, {}, b""),
        reply({"data": [GOOD]}, {"1": entry()}),
        reply({"data": []}, {"0": entry()}),
        reply({"data": [{**GOOD, "index": 1}]}, {"1": entry()}),
        reply({"data": [{**GOOD, "index": -1}]}, {"0": entry()}),
        reply({"data": [{**GOOD, "shape": [2]}]}, {"0": entry()}),
        reply({"data": [{**GOOD, "dtype": "float16"}]}, {"0": entry()}),
        reply({"data": [{**GOOD, "status": "error"}]}, {"0": entry()}),
        reply({"data": [{**GOOD, "status": "odd"}]}, {"0": entry()}),
        reply([], {"0": entry()}),
        reply(None, {"0": entry()}),
        Reply(200, {"content-type": SAFETENSORS}, body_of({}, b"")),
        Reply(200, {"content-type": "application/json"}, json.dumps({"data": [GOOD]}).encode()),
        Reply(200, {}, b""),
    ],
)
def test_nonsense_is_said(answer: Reply) -> None:
    with pytest.raises(BadReplyError):
        results_of(answer, [SOURCE], "numpy")


def refusal(status: int, body: bytes, **headers: str) -> Reply:
    return Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def test_a_proxys_page() -> None:
    with pytest.raises(RefusedError) as caught:
        json_of(refusal(502, b"<html>secret</html>"))
    assert (caught.value.status, caught.value.code) == (502, "HTTP_502")
    assert "secret" not in str(caught.value)


def test_busy() -> None:
    body = b'{"error":{"message":"full","type":"x","param":null,"code":"QUEUE_FULL"}}'
    with pytest.raises(BusyError) as caught:
        results_of(refusal(429, body, retry_after="7", x_request_id="r1"), [SOURCE], "numpy")
    error = caught.value
    assert (error.code, error.retry_after_s, error.request_id, error.message) == ("QUEUE_FULL", 7.0, "r1", "full")


def test_a_request_of_one_picture_may_fail_as_a_whole() -> None:
    body = b'{"error":{"message":"too big","code":"TOO_LARGE","param":null}}'
    (result,) = results_of(refusal(413, body), [SOURCE], "numpy")
    assert result.error is not None
    assert (result.error.code, result.error.message) == ("TOO_LARGE", "too big")
    with pytest.raises(RefusedError, match="too big"):
        results_of(refusal(413, body), [SOURCE, source_of(b"y", 1)], "numpy")
    with pytest.raises(RefusedError):
        results_of(refusal(400, body.replace(b"TOO_LARGE", b"INVALID_REQUEST")), [SOURCE], "numpy")


@given(st.integers(100, 599), st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_reply_gives_a_result_or_a_client_error(status: int, body: bytes) -> None:
    for headers in ({}, {"content-type": SAFETENSORS}):
        with contextlib.suppress(EncoderClientError):
            results_of(Reply(status, headers, body), [SOURCE], "numpy")
