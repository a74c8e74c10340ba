"""Items that are URLs: fetched at once, each with its own outcome, within the request's time and memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.app import create_app
from tests.harness.fake_service import FakeFetcher, FakeService, picture, picture_file

pytestmark = pytest.mark.timeout(20)

A, B = "https://a.test/cat.png?key=secret", "HTTP://b.test/dog.png"


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def fetcher() -> FakeFetcher:
    fetcher = FakeFetcher()
    fetcher.files = {A: picture_file(3), B: picture_file(4)}
    return fetcher


@pytest.fixture
async def client(service: FakeService, fetcher: FakeFetcher) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(service, fetcher, Config()) as client:
        yield client
    assert service.reserved == 0
    assert not fetcher.is_closed  # it is the caller's


def connected(service: FakeService, fetcher: FakeFetcher, config: Config) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(service, config, fetcher=fetcher))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def body(*texts: str, **more: Any) -> dict[str, Any]:
    return {"items": [{"image": text} for text in texts], **more}


async def test_urls_and_inline_items_mix(client: httpx.AsyncClient, service: FakeService) -> None:
    reply = await client.post("/v1/encode", json=body(A, picture(5), B, A))
    assert [item.width for item in service.seen[0].items] == [3, 5, 4, 3]
    digest = "sha256:" + hashlib.sha256(picture_file(3)).hexdigest()
    assert [entry["digest"] == digest for entry in reply.json()["data"]] == [True, False, False, True]


async def test_a_failed_fetch_is_its_items_failure(
    client: httpx.AsyncClient, service: FakeService, fetcher: FakeFetcher
) -> None:
    fetcher.files["http://x"] = EncoderError(ErrorCode.FETCH_FORBIDDEN, "not there")
    fetcher.files["file:///a"] = b"no picture"
    fetcher.files["https://empty"] = b""
    reply = await client.post("/v1/encode", json=body("http://x", A, "file:///a", "https://empty", "ftp://y"))
    outcomes = [entry.get("error", {}) for entry in reply.json()["data"]]
    assert [(outcome.get("code"), outcome.get("param")) for outcome in outcomes] == [
        ("FETCH_FORBIDDEN", "items[0]"),
        (None, None),
        ("MEDIA_UNSUPPORTED", "items[2]"),
        ("INVALID_REQUEST", "items[3]"),
        ("INVALID_REQUEST", "items[4]"),
    ]
    assert [item.width for item in service.seen[0].items] == [3]
    reply = await client.post("/v1/encode", json=body("http://x"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "FETCH_FORBIDDEN")


async def test_all_are_fetched_at_once_and_held_in_the_account(
    client: httpx.AsyncClient, service: FakeService, fetcher: FakeFetcher
) -> None:
    fetcher.gate.clear()
    asked = asyncio.create_task(client.post("/v1/encode", json=body(A, B, A, picture(5), B)))
    await fetcher.arrived.wait()
    await asyncio.sleep(0)
    assert fetcher.under_way == 4
    before = service.reserved
    fetcher.files[A] = picture_file(3) + bytes(2**20)
    service.gate.clear()
    fetcher.gate.set()
    await service.arrived.wait()
    assert service.reserved >= before + 2 * 2**20
    service.gate.set()
    assert (await asked).status_code == 200


async def test_no_memory_for_one_is_that_items_failure(client: httpx.AsyncClient, service: FakeService) -> None:
    service.max_inflight_bytes = 1000
    reply = await client.post("/v1/encode", json=body(A, picture(5)))
    assert [entry.get("error", {}).get("code") for entry in reply.json()["data"]] == ["OVERLOADED", None]


async def test_a_file_above_the_limit(service: FakeService, fetcher: FakeFetcher) -> None:
    config = replace(Config(), server=replace(Config().server, max_image_bytes=10))
    async with connected(service, fetcher, config) as client:
        reply = await client.post("/v1/encode", json=body(A))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE")


async def test_fetching_counts_against_the_requests_time(service: FakeService, fetcher: FakeFetcher) -> None:
    config = replace(Config(), limits=replace(Config().limits, request_timeout_s=0.2))
    fetcher.gate.clear()
    async with connected(service, fetcher, config) as client:
        reply = await client.post("/v1/encode", json=body(A, picture(5)))
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
        assert "--request-timeout-s" in reply.json()["error"]["message"]
        assert fetcher.cancelled == [A]
        fetcher.gate.set()
        assert (await client.post("/v1/encode", json=body(A))).status_code == 200
    left_s = service.seen[0].deadline_s
    assert left_s is not None and 0 < left_s <= 0.2
    assert service.reserved == 0


async def test_nothing_is_fetched_for_a_request_that_is_refused(
    client: httpx.AsyncClient, fetcher: FakeFetcher
) -> None:
    assert (await client.post("/v1/encode", json=body(A, model="gpt"))).status_code == 404
    assert not fetcher.arrived.is_set()


async def test_an_app_closes_its_own_fetcher(service: FakeService) -> None:
    app = create_app(service, Config())
    async with app.framework.router.lifespan_context(app.framework):
        pass
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post("/v1/encode", json=body("https://example.org/"))
    assert reply.status_code >= 400
