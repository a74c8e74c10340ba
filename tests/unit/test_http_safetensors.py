"""`/v1/encode` as safetensors: read back by the library, with torch and with numpy; and who gets it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from starlette.requests import Request

from spmd_encoder.api.types import Detail, Embedding, ItemFailure, ItemOutcome, MediaItem, Modality, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.accept import preferred
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.frontends.http.render import render_json
from spmd_encoder.frontends.http.render_tensors import MEDIA_TYPE, render_safetensors
from tests.harness.fake_service import FakeService, failing, picture, size_embedding

JSON = "application/json"
FAILED = ItemFailure(error=EncoderError(ErrorCode.MEDIA_CORRUPT, "bad"))


def embedding(values: torch.Tensor) -> Embedding:
    return Embedding(
        modality=Modality.IMAGE,
        kind=OutputKind.TOKENS,
        shape=tuple(values.shape),
        dtype=str(values.dtype).removeprefix("torch."),
        num_tokens=1,
        digest="sha256:0",
        data=memoryview(values.contiguous().view(torch.uint8).numpy().tobytes()),
        grid=(1, 2, 3),
    )


def test_its_metadata_have_what_a_language_model_needs(tmp_path: Path) -> None:
    details: dict[str, Detail] = {"timestamps": [0.25, 1.0], "num_frames": 4}
    outcomes: list[ItemOutcome] = [replace(embedding(torch.zeros(2, 3)), details=details), FAILED]
    assert response_of(body_of(outcomes), tmp_path)["data"][0]["details"] == details


def body_of(outcomes: list[ItemOutcome]) -> bytes:
    return b"".join(render_safetensors("id", "model", outcomes).body)


def response_of(body: bytes, folder: Path) -> Any:
    file = folder / "out.safetensors"
    file.write_bytes(body)
    with safe_open(file, "np") as opened:
        return json.loads(opened.metadata()["response"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_library_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {0: torch.randn(3, 5).to(dtype), 2: torch.randn(7).to(dtype), 3: torch.randn(1, 1).to(dtype)}
    outcomes = [embedding(tensors[n]) if n in tensors else FAILED for n in range(5)]
    body = body_of(outcomes)
    loaded = safetensors.torch.load(body)
    assert sorted(loaded) == ["0", "2", "3"]
    for index, values in tensors.items():
        assert loaded[str(index)].dtype is dtype
        assert torch.equal(loaded[str(index)], values)
    if dtype is not torch.bfloat16:
        assert np.array_equal(safetensors.numpy.load(body)["0"], tensors[0].numpy())
    expected = json.loads(bytes(render_json("id", "model", outcomes, "base64").body[0]))
    for entry in expected["data"]:
        entry.pop("embedding", None)
    assert response_of(body, tmp_path) == expected


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12),
    st.text(max_size=20),
)
def test_any_shapes_and_names(shapes: list[tuple[int, ...]], name: str) -> None:
    tensors = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    rendered = render_safetensors("id", name, [embedding(values) for values in tensors])
    assert (len(rendered.body[0])) % 8 == 0
    loaded = safetensors.torch.load(b"".join(rendered.body))
    assert all(torch.equal(loaded[str(n)], values) for n, values in enumerate(tensors))


def test_no_embedding_is_copied() -> None:
    data = bytearray(np.arange(8, dtype="<f4").tobytes())
    one = replace(embedding(torch.zeros(8)), data=memoryview(data))
    (_, part) = render_safetensors("id", "model", [one]).body
    data[0:4] = b"abcd"
    assert bytes(part[:4]) == b"abcd"


def test_what_cannot_be_written_is_the_items_failure(tmp_path: Path) -> None:
    good = embedding(torch.ones(4))
    body = body_of([replace(good, dtype="int8"), replace(good, shape=(5,)), good])
    assert list(safetensors.torch.load(body)) == ["2"]
    data = response_of(body, tmp_path)["data"]
    assert [entry.get("error", {}).get("code") for entry in data] == ["INTERNAL", "INTERNAL", None]
    assert data[1]["error"]["param"] == "items[1]"


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service, Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    assert service.reserved == 0


async def encode(client: httpx.AsyncClient, accept: str, *uris: str) -> httpx.Response:
    body = {"items": [{"image": uri} for uri in uris]}
    return await client.post("/v1/encode", json=body, headers={"accept": accept})


async def test_over_http(client: httpx.AsyncClient, service: FakeService, tmp_path: Path) -> None:
    big = np.arange(2**20, dtype="<f4")  # 4 MiB: more than one piece

    def answer(item: MediaItem) -> ItemOutcome:
        return replace(size_embedding(item), shape=big.shape, data=big.tobytes())

    service.answer = answer
    reply = await encode(client, MEDIA_TYPE, picture(5), "data:,", picture(6))
    assert (reply.status_code, reply.headers["content-type"]) == (200, MEDIA_TYPE)
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert reply.headers["x-spmd-replica"] == "0"
    loaded = safetensors.numpy.load(reply.content)
    assert sorted(loaded) == ["0", "2"]
    assert np.array_equal(loaded["2"], big)
    said = response_of(reply.content, tmp_path)
    assert said["id"] == reply.headers["x-request-id"]
    assert said["data"][1]["error"]["param"] == "items[1]"
    assert "embedding" not in said["data"][0]


async def test_errors_stay_json(client: httpx.AsyncClient, service: FakeService) -> None:
    reply = await encode(client, MEDIA_TYPE, "data:,", "x")
    assert (reply.status_code, reply.headers["content-type"]) == (400, JSON)
    assert reply.json()["error"] == reply.json()["data"][0]["error"]
    service.answer = failing(EncoderError(ErrorCode.QUEUE_FULL, "full"), width=5)
    reply = await encode(client, MEDIA_TYPE, picture(5))
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "QUEUE_FULL")
    assert "retry-after" in reply.headers
    reply = await client.post("/v1/encode", content=b"{", headers={"accept": MEDIA_TYPE})
    assert (reply.status_code, reply.headers["content-type"]) == (400, JSON)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/html", JSON),
        (MEDIA_TYPE, MEDIA_TYPE),
        ("Application/VND.SafeTensors ; Q=0.2", MEDIA_TYPE),
        (f"{MEDIA_TYPE}, */*", MEDIA_TYPE),
        (f"*/*, {MEDIA_TYPE}", MEDIA_TYPE),
        (f"{MEDIA_TYPE};q=0.5, */*", JSON),
        (f"{MEDIA_TYPE}, */*;q=0.1", MEDIA_TYPE),
        (f"{MEDIA_TYPE}, {JSON}", JSON),
        (f"{JSON};q=0.9, {MEDIA_TYPE}", MEDIA_TYPE),
        (f"{MEDIA_TYPE};q=0", JSON),
        (f"{MEDIA_TYPE};q=0, */*;q=0", JSON),
        (f"{JSON};q=0, */*", MEDIA_TYPE),
        (f"{MEDIA_TYPE};q=high", JSON),
        (f"{MEDIA_TYPE};q=2", JSON),
        (f"{MEDIA_TYPE};q=nan", JSON),
        (f";;,,{MEDIA_TYPE};a=b;q=0.3,", MEDIA_TYPE),
    ],
)
def test_accept(accept: str, expected: str) -> None:
    assert preferred(_request([accept]), (JSON, MEDIA_TYPE)) == expected


def test_accept_in_several_lines_or_none() -> None:
    assert preferred(_request([]), (JSON, MEDIA_TYPE)) == JSON
    assert preferred(_request([f"{JSON};q=0.1", MEDIA_TYPE]), (JSON, MEDIA_TYPE)) == MEDIA_TYPE


@given(st.text(st.characters(max_codepoint=255), max_size=60))
def test_no_header_breaks_it(accept: str) -> None:
    assert preferred(_request([accept, "," * 1000]), (JSON, MEDIA_TYPE)) in (JSON, MEDIA_TYPE)


def _request(accept: list[str]) -> Request:
    return Request({"type": "http", "headers": [(b"accept", text.encode("latin-1")) for text in accept]})
