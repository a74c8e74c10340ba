"""How long a caller wants to wait: by header or option, through every stage; and what the reply says of times."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from spmd_encoder.api.types import ItemOutcome, MediaItem, StageTimes
from spmd_encoder.config import Config
from spmd_encoder.frontends.http.app import create_app
from tests.harness.fake_service import FakeFetcher, FakeService, picture, picture_file, size_embedding

pytestmark = pytest.mark.timeout(20)

URL = "https://a.test/cat.png"
LIMITS = replace(Config().limits, request_timeout_s=50.0)


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def fetcher() -> FakeFetcher:
    fetcher = FakeFetcher()
    fetcher.files = {URL: picture_file(3)}
    return fetcher


@asynccontextmanager
async def connected(service: FakeService, fetcher: FakeFetcher, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, replace(Config(), limits=LIMITS, **changes), fetcher=fetcher)
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
        app.framework.router.lifespan_context(app.framework),
    ):
        yield client
    assert service.reserved == 0


@pytest.fixture
async def client(service: FakeService, fetcher: FakeFetcher) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(service, fetcher) as client:
        yield client


def body(*texts: str, **more: Any) -> dict[str, Any]:
    return {"items": [{"image": text} for text in texts or (picture(5),)], **more}


def stage(reply: httpx.Response) -> str:
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
    assert reply.json()["error"]["type"] == "timeout_error"
    return str(reply.json()["error"]["message"]).partition("stage ")[2].partition(" ")[0]


@pytest.mark.parametrize(
    ("header", "option", "most"),
    [
        (None, None, 50.0),
        ("20", None, 20.0),
        ("7.5", 20_000, 7.5),
        ("20", 7_500, 7.5),
        (None, 7_500, 7.5),
        ("100000", 10**9, 50.0),
    ],
)
async def test_the_least_of_all_limits_holds(
    client: httpx.AsyncClient, service: FakeService, header: str | None, option: int | None, most: float
) -> None:
    headers = {} if header is None else {"x-request-timeout": header}
    options = {} if option is None else {"deadline_ms": option}
    assert (await client.post("/v1/encode", json=body(**options), headers=headers)).status_code == 200
    left_s = service.seen[0].deadline_s
    assert left_s is not None
    assert most - 10 < left_s <= most


async def test_the_option_in_the_query_and_in_a_form(client: httpx.AsyncClient, service: FakeService) -> None:
    file = {"image": picture_file(5)}
    assert (await client.post("/v1/encode?deadline_ms=7000", json=body())).status_code == 200
    assert (await client.post("/v1/encode", files=file, data={"deadline_ms": "7000"})).status_code == 200
    headers = {"content-type": "image/png", "x-request-timeout": "7"}
    assert (await client.post("/v1/encode", content=picture_file(5), headers=headers)).status_code == 200
    assert (
        await client.post(
            "/v1/embeddings", json={"input": picture(5)}, headers=headers | {"content-type": "application/json"}
        )
    ).status_code == 200
    assert all(request.deadline_s is not None and request.deadline_s <= 7 for request in service.seen)
    assert len(service.seen) == 4


@pytest.mark.parametrize("text", ["", "0", "0.0", "-1", "1e3", "1s", "nan", "inf", "1,5", ".5", "5.", "١", "9" * 30])
async def test_headers_that_are_no_time(client: httpx.AsyncClient, service: FakeService, text: str) -> None:
    reply = await client.post("/v1/encode", json=body(), headers=[(b"x-request-timeout", text.encode())])
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert reply.json()["error"]["param"] == "x-request-timeout"
    assert service.seen == []


async def test_the_header_twice(client: httpx.AsyncClient) -> None:
    headers = [("x-request-timeout", "5"), ("x-request-timeout", "6")]
    assert (await client.post("/v1/encode", json=body(), headers=headers)).status_code == 400


@pytest.mark.parametrize("value", [0, -5, 1.5, "5", 10**10, True])
async def test_options_that_are_no_time(client: httpx.AsyncClient, value: object) -> None:
    reply = await client.post("/v1/encode", json=body(deadline_ms=value))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "deadline_ms")


async def test_over_while_the_body_arrives(client: httpx.AsyncClient, service: FakeService) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b'{"items": '
        await asyncio.sleep(5)

    reply = await client.post("/v1/encode", content=slow(), headers={"x-request-timeout": "0.05"})
    assert stage(reply) == "receive"
    assert service.seen == []


async def test_over_while_it_is_fetched(client: httpx.AsyncClient, fetcher: FakeFetcher, service: FakeService) -> None:
    fetcher.gate.clear()
    reply = await client.post("/v1/encode", json=body(URL, picture(5)), headers={"x-request-timeout": "0.1"})
    assert stage(reply) == "fetch"
    assert timing(reply)["fetch"] > 0
    assert fetcher.cancelled == [URL]
    assert service.seen == []


async def test_over_while_it_is_delivered(service: FakeService, fetcher: FakeFetcher) -> None:
    """Who listens there says nothing; the server's own limit of a delivery is far away."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        to = {"type": "zmq", "endpoint": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}
        async with connected(service, fetcher) as client:
            reply = await client.post("/v1/encode", json=body(destination=to, deadline_ms=300))
    assert stage(reply) == "delivery"
    assert len(service.seen) == 1


def timing(reply: httpx.Response) -> dict[str, float]:
    """Read as the standard has it, by what is not ours."""
    entries = [re.fullmatch(r"([a-z]+);dur=(\d+\.\d+)", entry) for entry in reply.headers["server-timing"].split(", ")]
    return {entry[1]: float(entry[2]) for entry in entries if entry is not None}


async def test_times_of_many_items_are_the_longest_of_each_stage(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    def answer(item: MediaItem) -> ItemOutcome:
        times = StageTimes(
            queue_s=item.width, preprocess_s=10 - item.width, forward_s=1 / item.width, transfer_s=item.width / 1000
        )
        return replace(size_embedding(item), times=times)

    service.answer = answer
    times = timing(await client.post("/v1/encode", json=body(picture(2), picture(8))))
    assert {name: times[name] for name in times if name != "total"} == {
        "queue": 8000.0,
        "preprocess": 8000.0,
        "forward": 500.0,
        "transfer": 8.0,
    }


async def test_stages_that_were_not_are_not_there(client: httpx.AsyncClient, fetcher: FakeFetcher) -> None:
    assert set(timing(await client.get("/health/live"))) == {"total"}
    encoded = {"total", "queue", "preprocess", "forward", "transfer"}
    assert set(timing(await client.post("/v1/encode", json=body()))) == encoded
    times = timing(await client.post("/v1/encode", json=body(URL, picture(5))))
    assert set(times) == {*encoded, "fetch"}
    assert times["fetch"] <= times["total"]
    staged = await client.post("/v1/encode", json=body(destination={"type": "staged"}))
    assert set(timing(staged)) == {*encoded, "delivery"}
