"""A thousand requests at once: all are answered, and where there is a limit, those above it are told to come again."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from spmd_encoder.client import AsyncClient, ChunkLimits
from tests.harness.world import World

BURST = 1000
LIMIT = 100
pytestmark = pytest.mark.timeout(600)


def pictures(first: int) -> list[bytes]:
    """All different, so that none is answered by another's work."""
    files = []
    for number in range(first, first + BURST):
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
    flags = ("--model-path", str(dinov2_tiny), "--max-queued-items", str(LIMIT))
    with World(*flags, nproc=2) as world:
        yield world.start().wait_ready(replicas=2)


async def burst(world: World, files: list[bytes]) -> list[httpx.Response]:
    """All at once, each on a connection of its own."""
    headers = {"content-type": "image/png"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=world.url, timeout=300, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/encode", content=file, headers=headers) for file in files))


def num_refused(world: World) -> int:
    lines = world.http.get("/metrics").text.splitlines()
    name = 'spmd_encoder_requests_refused_total{code="QUEUE_FULL"}'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


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
        results = await client.encode(pictures(2 * BURST))
    assert len(results) == BURST
    assert len({result.digest for result in results}) == BURST
    assert num_refused(limited) > before, "there was something to try again"
