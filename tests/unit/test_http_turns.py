"""Requests that bring media wait for their turn; what asks how the server is does not."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from spmd_encoder.errors import ErrorCode
from spmd_encoder.frontends.http.body import Timeouts
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.http.turns import _AT_ONCE, Turns
from spmd_encoder.frontends.sglang.parts import EXPECTED_TIMES
from tests.harness.fake_service import FakeService
from tests.unit.test_http_wire import CONFIG, GOOD, Served, post, serve_fake

pytestmark = pytest.mark.timeout(30)

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake(Timeouts()) as served:
        yield served


async def test_a_few_are_begun_in_each_turn_of_the_loop_in_order() -> None:
    turns, begun = Turns(100, FakeService(), HttpMetrics()), list[int]()
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


async def test_one_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    turns, begun = Turns(100, FakeService(), HttpMetrics()), list[int]()
    for number in range(2 * _AT_ONCE):
        turns.wait(lambda number=number: begun.append(1 // number))  # type: ignore[misc]
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(begun) == 2 * _AT_ONCE - 1 and not len(turns)
    assert "ZeroDivisionError" in caplog.text


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
    async with asyncio.timeout(30):
        while served.service.reserved:
            await asyncio.sleep(0.01)


async def test_several_requests_on_one_connection_keep_their_order(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(GOOD) + HEALTH + post(b"{") + HEALTH)
    assert [(await wire.reply()).status for _ in range(4)] == [200, 200, 400, 200]


def test_who_comes_when_too_many_wait_is_refused_in_the_words_of_his_protocol() -> None:
    service, metrics = FakeService(), HttpMetrics()
    turns = Turns(0, service, metrics)
    for path, status, code in (("/v1/encode", 429, "QUEUE_FULL"), ("/v1/embeddings", 429, "QUEUE_FULL")):
        refusal = turns.refusal(path, "POST")
        assert refusal is not None
        assert (refusal.status_code, refusal.headers["retry-after"]) == (status, "1")
        assert json.loads(bytes(refusal.body))["error"]["code"] == code
    refusal = turns.refusal("/encode", "POST")
    assert refusal is not None and refusal.status_code == 503
    assert json.loads(bytes(refusal.body))["status"] == "error"
    assert service.requests_refused == [ErrorCode.QUEUE_FULL] * 3
    assert (
        'spmd_encoder_http_requests_total{code="429",method="POST",route="/v1/encode"} 1.0' in metrics.text().decode()
    )


async def test_sglangs_calls_wait_where_others_are_refused() -> None:
    """As many as there may be parts that receivers wait for."""
    turns = Turns(2, FakeService(), HttpMetrics())
    for number in range(2 * EXPECTED_TIMES):
        assert (turns.refusal("/v1/encode", "POST") is None) == (number < 2)
        assert turns.refusal("/encode", "POST") is None
        turns.wait(lambda: None)
    assert turns.refusal("/encode", "POST") is not None


async def test_a_crowd_beyond_the_limit_is_answered_too() -> None:
    config = replace(CONFIG, limits=replace(CONFIG.limits, max_queued_items=20))
    async with serve_fake(Timeouts(), config) as served:
        crowd = [await served.connect() for _ in range(300)]
        for wire in crowd:
            wire.send(post(GOOD) + HEALTH)
        statuses: collections.Counter[int] = collections.Counter()
        for wire in crowd:
            statuses[(await wire.reply()).status] += 1
            assert (await wire.reply()).status == 200
        assert statuses.keys() == {200, 429} and statuses[200] >= 20
