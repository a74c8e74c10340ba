"""Requests that bring media wait for their turn; what asks how the server is does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from spmd_encoder.frontends.http.turns import _AT_ONCE, Turns
from tests.unit.test_http_wire import GOOD, Served, post, serve_fake

pytestmark = pytest.mark.timeout(30)

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake() as served:
        yield served


async def test_a_few_are_begun_in_each_turn_of_the_loop_in_order() -> None:
    turns, begun = Turns(), list[int]()
    for number in range(3 * _AT_ONCE - 1):
        turns.wait(lambda number=number: begun.append(number))  # type: ignore[misc]
    counts = []
    while len(turns):
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert begun == list(range(3 * _AT_ONCE - 1))
    steps = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert max(steps) <= _AT_ONCE and len(counts) >= 3
    turns.wait(lambda: begun.append(-1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun[-1] == -1 and not len(turns)


def test_only_what_brings_media_waits() -> None:
    assert [path for path in ("/v1/encode", "/v1/embeddings", "/encode") if not Turns.waits(path)] == []
    light = ("/health", "/health/live", "/health/ready", "/scheduler_receive_url", "/metrics", "/v1/models", "/none")
    assert [path for path in light if Turns.waits(path)] == []


async def test_a_crowd_is_answered(served: Served) -> None:
    crowd = [await served.connect() for _ in range(200)]
    for wire in crowd:
        wire.send(post(GOOD))
    assert [(await wire.reply()).status for wire in crowd] == [200] * 200


async def test_who_has_gone_while_waiting_is_not_begun(served: Served) -> None:
    """And holds nothing."""
    crowd = [await served.connect() for _ in range(100)]
    for wire in crowd:
        wire.send(post(GOOD))
        wire.close()
    wire = await served.connect()
    wire.send(post(GOOD))
    assert (await wire.reply()).status == 200
    async with asyncio.timeout(5):
        while served.service.reserved:
            await asyncio.sleep(0.01)


async def test_several_requests_on_one_connection_keep_their_order(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(GOOD) + HEALTH + post(b"{") + HEALTH)
    assert [(await wire.reply()).status for _ in range(4)] == [200, 200, 400, 200]
