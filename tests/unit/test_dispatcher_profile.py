"""Profiles through the dispatcher: asked of all replicas, beside the work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from spmd_encoder.api.profiling import ProfileOptions
from spmd_encoder.errors import ErrorCode
from tests.harness.dispatcher_world import done, refused, until, world


def profile_said(task: asyncio.Task[Any]) -> list[tuple[int, str]]:
    return [(outcome.rank, outcome.path or str(outcome.code)) for outcome in task.result()]


async def test_a_profile_is_asked_of_all_replicas_beside_the_work(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, tp=2) as w:
        schedulers = await w.up()
        for scheduler in schedulers:
            scheduler.held = True
        encodes = w.encode(b"aaaa", b"bbbb")
        await until(lambda: w.outstanding() == [1, 1])
        options = ProfileOptions(name="n", num_steps=3)
        start = asyncio.create_task(w.dispatcher.profile_start(options))
        await until(lambda: all(s.profiles for s in schedulers))
        assert [s.profiles[0].start for s in schedulers] == [options, options]
        assert w.outstanding() == [1, 1]
        for scheduler, path in zip(schedulers, "ab", strict=True):
            scheduler.profiled(more=7, path="another call's")
            scheduler.profiled(path=path)
            scheduler.profiled(path="said twice")
        await asyncio.wait_for(start, 30)
        assert profile_said(start) == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
        stop = asyncio.create_task(w.dispatcher.profile_stop())
        await until(lambda: all(len(s.profiles) == 2 for s in schedulers))
        assert [s.profiles[1].start for s in schedulers] == [None, None]
        for scheduler in schedulers:
            scheduler.profiled(0, path="an old call's")
            scheduler.profiled()
        await asyncio.wait_for(stop, 30)
        assert profile_said(stop) == [(rank, "p") for rank in range(4)]
        for scheduler in schedulers:
            scheduler.release()
        assert await done(encodes) == [b"aaaa", b"bbbb"]


async def test_a_replica_that_is_lost_while_it_profiles_is_named(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, tp=2) as w:
        schedulers = await w.up()
        start = asyncio.create_task(w.dispatcher.profile_start(ProfileOptions(name="n")))
        await until(lambda: all(s.profiles for s in schedulers))
        schedulers[0].profiled()
        w.keepers[2].report(0)
        await asyncio.wait_for(start, 30)
        assert profile_said(start) == [(0, "p"), (1, "p"), (2, "NOT_READY"), (3, "NOT_READY")]
        assert "lost" in start.result()[2].message
        stop = asyncio.create_task(w.dispatcher.profile_stop())
        await until(lambda: len(schedulers[0].profiles) == 2)
        schedulers[0].profiled()
        await asyncio.wait_for(stop, 30)
        assert profile_said(stop) == [(0, "p"), (1, "p"), (2, "NOT_READY"), (3, "NOT_READY")]
        assert "not ready" in stop.result()[2].message


async def test_a_profile_that_is_not_answered_ends(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, limits={"request_timeout_s": 0.3}) as w:
        schedulers = await w.up()
        start = asyncio.create_task(w.dispatcher.profile_start(ProfileOptions(name="n")))
        await until(lambda: schedulers[1].profiles)
        schedulers[1].profiled()
        await asyncio.wait_for(start, 30)
        assert profile_said(start) == [(0, "DEADLINE_EXCEEDED"), (1, "p")]
        assert w.dispatcher.ready_state().replicas_ready == 2


async def test_no_profile_before_the_start_or_in_the_end(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        options = ProfileOptions(name="n")
        await refused(asyncio.create_task(w.dispatcher.profile_start(options)), ErrorCode.NOT_READY)
        (scheduler,) = await w.up()
        await w.dispatcher.drain(1.0)
        await refused(asyncio.create_task(w.dispatcher.profile_start(options)), ErrorCode.DRAINING)
        stop = asyncio.create_task(w.dispatcher.profile_stop())
        await until(lambda: scheduler.profiles)
        scheduler.profiled()
        assert [outcome.path for outcome in await stop] == ["p"]
