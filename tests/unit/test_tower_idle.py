"""Why the tower stands still, and that it does not wait for what could be prepared while it ran."""

from __future__ import annotations

import asyncio
import time

from spmd_encoder.scheduler.stats import Idle, TowerClock
from tests.harness.scheduler_bench import Bench, bench, job


def idle(b: Bench) -> tuple[float, float, float]:
    """Seconds: empty, waiting for preparation, delivering."""
    stats = b.scheduler.heartbeat().stats
    return stats.idle_empty_s, stats.idle_preparation_s, stats.idle_delivery_s


async def pass_by(b: Bench, seconds: float) -> None:
    b.now += seconds
    await b.settle()


async def test_each_second_has_its_reason() -> None:
    async with bench() as b:
        await pass_by(b, 3.0)
        assert idle(b) == (3.0, 0.0, 0.0), "nothing is here"
        b.engine.hold_prepare[1] = asyncio.Event()
        b.submit(job(1))
        await b.settle()
        await pass_by(b, 5.0)
        assert idle(b) == (3.0, 5.0, 0.0), "what is here is being prepared"
        b.engine.hold_prepare[1].set()
        await b.settle()
        assert b.engine.batches == [[1]]
        await pass_by(b, 1.0)
        assert idle(b) == (3.0, 5.0, 0.0), "a batch counts when it is over"
        b.engine.gate.set()  # its forward says that it took 0.25 s
        await b.settle()
        assert idle(b) == (3.0, 5.0, 0.75)
        await pass_by(b, 2.0)
        assert idle(b) == (5.0, 5.0, 0.75)


async def test_under_load_the_next_batch_is_prepared_before_the_forward_ends() -> None:
    async with bench(max_items=2, lookahead=4) as b:
        b.submit(*(job(number) for number in range(1, 9)))
        await b.settle()
        while len(b.completed) < 8:
            ran = sum(map(len, b.engine.batches))
            assert len(b.engine.prepared) >= min(8, ran + 4), "two batches are prepared beside the one that runs"
            b.now += 0.25  # what a forward says that it took
            b.engine.gate.set()
            batches = len(b.engine.batches)
            while len(b.engine.batches) == batches and len(b.completed) < 8:
                await asyncio.sleep(0)
            b.engine.gate.clear()
            await b.settle()
        assert idle(b) == (0.0, 0.0, 0.0), "the tower waited for nobody"


async def test_slow_preparation_shows() -> None:
    async with bench(max_items=1, lookahead=1) as b:
        b.engine.gate.set()
        for number in (1, 2, 3):
            b.engine.hold_prepare[number] = asyncio.Event()
        b.submit(job(1), job(2), job(3))
        await b.settle()
        for number in (1, 2, 3):
            await pass_by(b, 2.0)
            b.engine.hold_prepare[number].set()
            await b.settle()
        assert idle(b)[1] == 6.0


def test_the_clock_never_goes_back() -> None:
    now = [0.0]
    clock = TowerClock(lambda: now[0])
    clock.batch_began()
    now[0] = 1.0
    assert sum(clock.idle_s().values()) == 0.0
    clock.batch_ended(forward_s=5.0)  # another clock's word
    assert clock.idle_s()[Idle.DELIVERY] == 0.0


async def test_the_loops_share_of_the_processor_is_told() -> None:
    async with bench() as b:
        before = b.scheduler.heartbeat(1.5).stats
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        after = b.scheduler.heartbeat(2.5).stats
        assert after.loop_cpu_s - before.loop_cpu_s >= 0.02
        assert (before.compute_cpu_s, after.compute_cpu_s) == (1.5, 2.5)
