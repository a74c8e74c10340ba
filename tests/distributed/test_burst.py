"""A thousand requests at once: all are answered, and where there is a limit, those above it are told to come again.
As many items as one request may have, and one URL that many want at once."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from spmd_encoder.client import AsyncClient, ChunkLimits
from spmd_encoder.config import Config
from tests.harness import raw_http
from tests.harness.families import WholeModel
from tests.harness.web import Exchange, web
from tests.harness.world import World, noise_png, off_by, vector

BURST = 1000
LIMIT = 100
pytestmark = pytest.mark.timeout(600)


def pictures(first: int, count: int = BURST) -> list[bytes]:
    """All different, so that none is answered by another's work."""
    files = []
    for number in range(first, first + count):
        out = io.BytesIO()
        pixels = np.full((28, 28, 3), 7, np.uint8)
        pixels[0, :4, 0] = list(number.to_bytes(4, "little"))
        Image.fromarray(pixels).save(out, "PNG")
        files.append(out.getvalue())
    return files


@pytest.fixture(scope="module")
def world(dinov2_tiny: Path) -> Iterator[World]:
    with World("--model-path", str(dinov2_tiny), nproc=2) as world:
        yield world.start().wait_ready(replicas=2)


@pytest.fixture(scope="module")
def limited(dinov2_tiny: Path) -> Iterator[World]:
    flags = ("--model-path", str(dinov2_tiny), "--max-queued-items", str(LIMIT), "--allow-private-media-hosts")
    with World(*flags, nproc=2) as world:
        yield world.start().wait_ready(replicas=2)


async def burst(world: World, files: list[bytes]) -> list[httpx.Response]:
    """All at once, each on a connection of its own."""
    headers = {"Content-Type": "image/png"}
    return await asyncio.gather(*(raw_http.post(world.port, "/v1/encode", file, headers) for file in files))


def measured(world: World, name: str) -> int:
    lines = world.http.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def num_refused(world: World) -> int:
    return measured(world, 'spmd_encoder_requests_refused_total{code="QUEUE_FULL"}')


async def test_with_the_default_limits_all_are_answered(world: World) -> None:
    replies = await burst(world, pictures(0))
    assert [reply.status_code for reply in replies] == [200] * BURST
    assert {reply.headers["x-spmd-replica"] for reply in replies} == {"0", "1"}
    assert len({reply.json()["data"][0]["digest"] for reply in replies}) == BURST


async def test_above_a_limit_they_are_told_to_come_again(limited: World) -> None:
    before = num_refused(limited)
    replies = await burst(limited, pictures(BURST))
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= LIMIT
    refused = [reply for reply in replies if reply.status_code == 429]
    assert {reply.json()["error"]["code"] for reply in refused} == {"QUEUE_FULL"}
    assert all(1 <= int(reply.headers["retry-after"]) <= 60 for reply in refused)
    assert num_refused(limited) == before + len(refused)


async def test_with_the_clients_retries_all_are_answered(limited: World) -> None:
    before = num_refused(limited)
    one_each = ChunkLimits(items=1)
    async with AsyncClient(limited.url, concurrency=2 * LIMIT, limits=one_each, timeout_s=300) as client:
        results = await client.encode(pictures(2 * BURST, 4 * LIMIT))
    assert len(results) == 4 * LIMIT
    assert len({result.digest for result in results}) == 4 * LIMIT
    assert num_refused(limited) > before, "there was something to try again"


def test_as_many_items_as_a_request_may_have(world: World, dinov2_tiny: Path) -> None:
    files = pictures(3 * BURST, Config().server.max_items_per_request)
    reply = world.post(files)
    assert (reply.status_code, reply.headers["x-spmd-replica"]) == (200, "0,1")
    entries = reply.json()["data"]
    assert [entry["index"] for entry in entries] == list(range(256))
    whole = WholeModel("dinov2", dinov2_tiny)
    for entry, file in zip(entries, files, strict=True):
        assert entry["digest"] == f"sha256:{hashlib.sha256(file).hexdigest()}"
        _, pooled = whole.encode(Image.open(io.BytesIO(file)).convert("RGB"))
        assert pooled is not None and off_by(vector(entry), pooled.numpy()) <= 1e-6, entry["index"]


@pytest.mark.parametrize("per_request", [1, 64])
async def test_a_url_that_many_want_at_once_is_fetched_once(limited: World, per_request: int) -> None:
    file = noise_png(per_request, 200, 200)
    half = len(file) // 2

    async def answer(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(file) + file[:half])
        # Each that waits for it has the bytes on its account: the rest is not sent before all of them do.
        while await asyncio.to_thread(measured, limited, "spmd_encoder_inflight_bytes") < 64 * half:
            await asyncio.sleep(0.05)
        await exchange.send(file[half:])

    async with web(answer) as site, httpx.AsyncClient(base_url=limited.url, timeout=300) as client:
        body = {"items": [{"image": f"http://127.0.0.1:{site.port}/cat.png"}] * per_request}
        replies = await asyncio.gather(*(client.post("/v1/encode", json=body) for _ in range(64 // per_request)))
        assert len(site.seen) == 1
    entries = [entry for reply in replies for entry in reply.json()["data"]]
    assert len(entries) == 64 and {entry["status"] for entry in entries} == {"ok"}
    assert {entry["digest"] for entry in entries} == {f"sha256:{hashlib.sha256(file).hexdigest()}"}
    assert len({entry["embedding"] for entry in entries}) == 1
