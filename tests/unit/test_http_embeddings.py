"""`POST /v1/embeddings`: OpenAI's shapes, its own client, and what it may not be asked."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from spmd_encoder.api.types import ItemOutcome, MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.media.frames import pack
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.fake_service import (
    MODEL,
    STARTING,
    FakeFetcher,
    FakeService,
    failing,
    picture,
    picture_file,
    size_embedding,
)
from tests.harness.media import tone, wav

URL = "https://a.test/cat.png"
SERVER = replace(Config().server, max_items_per_request=4)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    fetcher = FakeFetcher()
    fetcher.files = {URL: picture_file(3), "http://x": EncoderError(ErrorCode.FETCH_FAILED, "no such host")}
    app = create_app(service, replace(Config(), server=SERVER), fetcher=fetcher)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    assert service.reserved == 0


async def embed(client: httpx.AsyncClient, given: Any, **more: Any) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"input": given, **more})


def vectors(reply: httpx.Response) -> list[list[float]]:
    assert reply.status_code == 200
    return [entry["embedding"] for entry in reply.json()["data"]]


async def test_reply_shape(client: httpx.AsyncClient, service: FakeService) -> None:
    reply = await embed(client, [picture(5), picture(6)], model="fake", user="me", dimensions=2)
    assert reply.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [5.0, 9.0]},
            {"object": "embedding", "index": 1, "embedding": [6.0, 9.0]},
        ],
        "model": "fake",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    assert reply.headers["x-spmd-replica"] == "0"
    assert service.seen[0].output is OutputKind.POOLED
    assert service.seen[0].request_id == reply.headers["x-request-id"]


async def test_every_way_to_name_a_picture(client: httpx.AsyncClient) -> None:
    ways: list[Any] = [
        picture(3),
        URL,
        {"image": picture(3)},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    ]
    assert vectors(await embed(client, ways)) == [[3, 9]] * 4
    for way in ways:
        assert vectors(await embed(client, way)) == [[3, 9]]


async def test_sounds_and_films(client: httpx.AsyncClient, service: FakeService) -> None:
    sound = base64.b64encode(wav(tone(1600, 16_000), 16_000)).decode()
    film = "data:video/x;base64," + base64.b64encode(pack([picture_file(3)], 2.0)).decode()
    ways: list[Any] = [
        {"audio": "data:audio/wav;base64," + sound},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"video": film},
        {"type": "video_url", "video_url": {"url": film}},
    ]
    assert len(vectors(await embed(client, ways))) == 4
    assert [item.modality.value for item in service.seen[0].items] == ["audio", "audio", "video", "video"]
    for bad in ({**ways[0], **ways[2]}, {**ways[1], "type": "video_url"}, {"input_audio": {"data": sound}}, {}):
        reply = await embed(client, [bad])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[0]")
    reply = await embed(client, {"type": "input_audio", "input_audio": {"data": "!!"}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("float32", np.array([1.1, -2.0], "<f4").tobytes()),
        ("bfloat16", np.array([0x3F8D, 0xC000], "<u2").tobytes()),
        ("float16", np.array([1.1, -2.0], "<f2").tobytes()),
        ("float64", np.array([1.1, -2.0], "<f8").tobytes()),
    ],
)
async def test_base64_is_float32(client: httpx.AsyncClient, service: FakeService, dtype: str, data: bytes) -> None:
    service.answer = lambda item: replace(size_embedding(item), dtype=dtype, data=data)
    (text,) = vectors(await embed(client, picture(5), encoding_format="base64"))
    (numbers,) = vectors(await embed(client, picture(5), encoding_format="float"))
    decoded = np.frombuffer(base64.b64decode(str(text), validate=True), "<f4")
    assert decoded.tolist() == np.array(numbers, "<f4").tolist()
    assert abs(decoded[0] - 1.1) < 0.01 and decoded[1] == -2


async def test_one_bad_item_fails_the_request(client: httpx.AsyncClient, service: FakeService) -> None:
    for bad, status, code in [
        ("data:,", 400, "INVALID_REQUEST"),
        ("data:;base64,c2VjcmV0", 415, "MEDIA_UNSUPPORTED"),
        ("http://x", 422, "FETCH_FAILED"),
    ]:
        reply = await embed(client, [picture(5), bad, picture(6)])
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (status, code, "input[1]")
        assert set(reply.json()) == {"error"}
        assert (await embed(client, bad)).json()["error"]["param"] == "input"
    assert service.seen == []
    codes = [ErrorCode.INVALID_REQUEST, ErrorCode.MEDIA_UNSUPPORTED, ErrorCode.FETCH_FAILED]
    assert service.refused == [code for code in codes for _ in range(2)]
    service.answer = failing(EncoderError(ErrorCode.MEDIA_CORRUPT, "bad"), width=6)
    reply = await embed(client, [picture(5), URL, picture(6)])
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (422, "MEDIA_CORRUPT", "input[2]")
    assert reply.headers["x-spmd-replica"] == "0,1"
    assert len(service.refused) == 6, "the service counts what it answers by itself"


async def test_nothing_is_fetched_where_an_item_is_bad_already(service: FakeService) -> None:
    fetcher = FakeFetcher()
    app = create_app(service, Config(), fetcher=fetcher)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        reply = await embed(client, [URL, "no picture"])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[1]")
    assert fetcher.peak == 0


async def test_values_that_are_not_finite(client: httpx.AsyncClient, service: FakeService) -> None:
    def answer(item: MediaItem) -> ItemOutcome:
        return replace(size_embedding(item), data=np.array([1, np.nan], "<f4").tobytes())

    service.answer = answer
    for encoding in ("float", "base64"):
        reply = await embed(client, [picture(5)], encoding_format=encoding)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "NON_FINITE")
        assert reply.json()["error"]["param"] == "input[0]"


@pytest.mark.parametrize(
    "text",
    [
        *("a photo of a cat", "", "cat.png", "ftp://a/b", "iVBORw0KGgo="),
        *(5, [1, 2], {}, {"image": "text"}, {"type": "image_url"}, {"image_url": {"url": URL}}),
        {"image": picture(5), "image_url": {"url": URL}},
    ],
    ids=str,
)
async def test_text_is_not_embedded(client: httpx.AsyncClient, text: Any) -> None:
    reply = await embed(client, [picture(5), text])
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "INVALID_REQUEST", "input[1]")
    assert "films, not text" in error["message"] and "data:image/png;base64," in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [None]}, "input[0]"),
        ({"input": [{"image": 5}]}, "input[0].image"),
        ({"input": [{"picture": "x"}]}, "input[0].picture"),
        ({"input": picture(5), "output": "tokens"}, "output"),
        ({"input": picture(5), "encoding_format": "hex"}, "encoding_format"),
        ({"input": picture(5), "dimensions": 3}, "dimensions"),
        ({"input": picture(5), "dimensions": 0}, "dimensions"),
        ({"input": picture(5), "dimensions": "2"}, "dimensions"),
    ],
)
async def test_malformed(client: httpx.AsyncClient, service: FakeService, body: Any, param: str) -> None:
    reply = await client.post("/v1/embeddings", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "INVALID_REQUEST", param)
    assert service.seen == []


async def test_limits_types_and_queries(client: httpx.AsyncClient) -> None:
    reply = await embed(client, [picture(5)] * 5)
    assert (reply.status_code, reply.json()["error"]["param"]) == (413, "input")
    content = json.dumps({"input": picture(5)}).encode()
    for kind in ("multipart/form-data; boundary=b", "image/png", "text/plain"):
        reply = await client.post("/v1/embeddings", content=content, headers={"content-type": kind})
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "MEDIA_UNSUPPORTED")
    headers = {"origin": "http://evil.test"}
    assert (await client.post("/v1/embeddings", content=content, headers=headers)).status_code == 403
    assert (await client.post("/v1/embeddings?api-version=2024-10-21", content=content)).status_code == 200


async def test_models(client: httpx.AsyncClient, service: FakeService) -> None:
    for name in (MODEL.name, Config().served_name):
        assert (await embed(client, picture(5), model=name)).status_code == 200
    reply = await embed(client, picture(5), model="text-embedding-3-small")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert reply.json()["error"]["param"] == "model"
    service.model = replace(MODEL, outputs=(OutputKind.TOKENS,), default_output=OutputKind.TOKENS)
    reply = await embed(client, picture(5))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert "/v1/encode" in reply.json()["error"]["message"] and '"tokens"' in reply.json()["error"]["message"]
    for unread in ("no picture", picture(5), "data:;base64,AAAA"):
        reply = await embed(client, [unread], model="gpt")
        assert "no single vector" in reply.json()["error"]["message"], "said before any picture is read"
    service.model = replace(MODEL, embedding_dims={OutputKind.TOKENS: 7, OutputKind.POOLED: 2})
    assert (await embed(client, picture(5), dimensions=2)).status_code == 200
    assert (await embed(client, picture(5), dimensions=7)).status_code == 400
    service.model, service.state = None, STARTING
    reply = await embed(client, picture(5))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "NOT_READY")
    assert "retry-after" in reply.headers


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def official(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client(official: openai.OpenAI) -> None:
    """It asks for base64 where it is told nothing, and decodes it."""
    reply = official.embeddings.create(model="fake", input=[picture(5), picture(300)])
    assert [entry.embedding for entry in reply.data] == [[5.0, 9.0], [300.0, 9.0]]
    assert [entry.index for entry in reply.data] == [0, 1]
    assert (reply.model, reply.usage.total_tokens) == ("fake", 2)
    reply = official.embeddings.create(model="fake", input=picture(5), encoding_format="float", user="me")
    assert reply.data[0].embedding == [5.0, 9.0]
    assert [model.id for model in official.models.list()] == ["fake"]


def test_openais_client_raises_what_it_knows(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        official.embeddings.create(model="gpt", input=picture(5))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="films, not text") as text:
        official.embeddings.create(model="fake", input=[picture(5), "hello"])
    assert (text.value.code, text.value.param, text.value.type) == (
        "INVALID_REQUEST",
        "input[1]",
        "invalid_request_error",
    )
    cut = base64.b64encode(picture_file(5)[:20]).decode()
    with pytest.raises(openai.UnprocessableEntityError):
        official.embeddings.create(model="fake", input=f"data:;base64,{cut}")


def test_openais_client_is_told_when_to_come_back(server: FakeServer) -> None:
    server.service.refusal = EncoderError(ErrorCode.QUEUE_FULL, "full", retry_after_s=1)
    try:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.RateLimitError) as full,
        ):
            client.embeddings.create(model="fake", input=picture(5))
        assert full.value.response.headers["retry-after"] == "1"
    finally:
        server.service.refusal = None
