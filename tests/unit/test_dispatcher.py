"""The dispatcher: what callers are answered, and what it holds meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest

from spmd_encoder.api.types import ItemFailure
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.wire.messages import Failed, Stop
from tests.harness.dispatcher_world import MODEL, answers, count_open_files, done, item, refused, until, world


async def test_ready_after_a_probe_of_every_replica(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        assert w.dispatcher.model_info() is None
        await refused(w.encode(b"early"), ErrorCode.NOT_READY)
        first = w.scheduler(0)
        await until(lambda: w.dispatcher.ready_state().replicas_ready == 1)
        assert [job.probe for job in first.jobs] == [True]
        assert not w.dispatcher.ready_state().ready, "the world has not started"
        await refused(w.encode(b"early"), ErrorCode.NOT_READY)
        w.scheduler(1)
        await until(lambda: w.dispatcher.ready_state().ready)
        assert w.dispatcher.model_info() == MODEL
        assert await done(w.encode(b"aaaa")) == [b"aaaa"]


async def test_a_start_deadline_lets_a_part_of_the_world_serve(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2, start_deadline_s=0.2) as w:
        w.scheduler(1)
        await until(lambda: w.dispatcher.ready_state().ready)
        assert await done(w.encode(b"aaaa", b"bbbb")) == [b"aaaa", b"bbbb"]


async def test_outcomes_keep_the_order_of_the_items(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        schedulers = await w.up()
        for scheduler in schedulers:
            scheduler.held = True
        data = [b"%04d" % number for number in range(12)]
        task = w.encode(*data)
        await until(lambda: sum(len(s.open) for s in schedulers) == 12)
        assert [len(s.open) for s in schedulers] == [6, 6]
        assert w.metric("spmd_encoder_items_in_hand") == 12
        for scheduler in reversed(schedulers):
            scheduler.open.reverse()
            scheduler.release()
        outcomes = await asyncio.wait_for(task, 30)
        assert answers(outcomes) == data
        assert {out.replica for out in outcomes} == {0, 1}
        assert [out.digest for out in outcomes] == [item(d).digest for d in data]
        assert w.outstanding() == [0, 0]
        assert w.metric('spmd_encoder_items_total{outcome="ok"}') == 12, "probes are nobody's"


async def test_items_that_front_ends_refuse_are_counted_beside_the_others(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.dispatcher.item_refused(ErrorCode.MEDIA_CORRUPT)
        assert w.metric('spmd_encoder_items_total{outcome="media_corrupt"}') == 1


async def test_an_items_failure_is_its_own(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"good", b"evil")
        await until(lambda: len(scheduler.open) == 2)
        evil = scheduler.open.pop()
        scheduler.socket.send(Failed(job_id=evil.job_id, code=ErrorCode.MEDIA_CORRUPT, message="cannot be read"))
        scheduler.release()
        good, bad = await asyncio.wait_for(task, 30)
        assert bytes(good.data) == b"good"
        assert isinstance(bad, ItemFailure)
        assert (bad.error.code, bad.error.message, bad.replica) == (ErrorCode.MEDIA_CORRUPT, "cannot be read", 0)


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_queued_items": 3}) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(scheduler.open) == 2)
        error = await refused(w.encode(b"cccc", b"dddd"), ErrorCode.QUEUE_FULL)
        assert "--max-queued-items" in error.message
        assert w.metric('spmd_encoder_requests_refused_total{code="QUEUE_FULL"}') == 1
        scheduler.release()
        assert await done(task) == [b"aaaa", b"bbbb"]
        assert await done(w.encode(b"cccc", b"dddd")) == [b"cccc", b"dddd"]


async def test_a_caller_that_goes_takes_its_items_along(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_batch_items": 1}) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(*(b"%04d" % number for number in range(5)))
        await until(lambda: len(scheduler.open) == 3)  # the window
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert w.metric("spmd_encoder_items_in_hand") == 0
        await until(lambda: sorted(scheduler.cancelled) == [job.job_id for job in scheduler.real_jobs])
        assert w.outstanding() == [3], "charged until the replica has answered"
        scheduler.release()
        await until(lambda: w.outstanding() == [0])
        assert await done(w.encode(b"next")) == [b"next"]
        assert len(scheduler.real_jobs) == 4


async def test_a_deadline_is_an_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        patient = w.encode(b"bbbb")
        task = w.encode(b"aaaa", deadline_s=0.1)
        await until(lambda: len(scheduler.open) == 2)
        assert sorted(job.budget_s < 0.2 for job in scheduler.open) == [False, True]
        assert await done(task) == [ErrorCode.DEADLINE_EXCEEDED]
        await until(lambda: scheduler.cancelled)
        assert await done(w.encode(b"cccc", deadline_s=0.0)) == [ErrorCode.DEADLINE_EXCEEDED]
        assert not patient.done()
        scheduler.release()
        assert await done(patient) == [b"bbbb"]


async def test_a_full_queue_says_how_long_it_will_take(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_queued_items": 4}) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        tasks = [w.encode(b"%d" % number) for number in range(4)]
        await until(lambda: len(scheduler.open) == 4)
        for number in range(2):
            waiting, scheduler.open = scheduler.open[1:], scheduler.open[:1]
            scheduler.release()
            assert await done(tasks.pop(0)) == [b"%d" % number]
            scheduler.held, scheduler.open = True, waiting
            await asyncio.sleep(0.5 * (1 - number))  # from its first answer on the world's pace is known
        tasks += [w.encode(b"4"), w.encode(b"5")]
        await until(lambda: len(scheduler.open) == 4)
        waits = [(await refused(w.encode(b"more"), ErrorCode.QUEUE_FULL)).retry_after_s or 0.0 for _ in range(20)]
        assert min(waits) >= 1.0
        assert max(waits) >= 1.9, "40 tokens, at 10 in half a second or slower"
        assert len({round(wait, 2) for wait in waits}) == 20, "they do not come back all at once"
        scheduler.release()
        for task in tasks:
            await task


async def test_drain_finishes_what_is_accepted_and_takes_nothing_new(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: scheduler.open)
        drain = asyncio.create_task(w.dispatcher.drain(5.0))
        await asyncio.sleep(0.01)
        state = w.dispatcher.ready_state()
        assert (state.ready, state.draining) == (False, True)
        await refused(w.encode(b"bbbb"), ErrorCode.DRAINING)
        assert not drain.done()
        scheduler.release()
        assert await asyncio.wait_for(drain, 30) is True
        assert await done(task) == [b"aaaa"]
        await w.dispatcher.stop_world(Stop(exit_code=0))
        await until(lambda: w.keepers[0].got == [Stop(exit_code=0)])
        await w.keepers[0].close()
        await asyncio.sleep(0.02)
        assert w.dispatcher.info()["replicas"][0]["state"] == "gone"


async def test_a_drain_that_is_cut_off_says_so(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        task = w.encode(b"aaaa")
        await until(lambda: scheduler.open)
        assert await w.dispatcher.drain(0.05) is False
        assert await done(task) == [ErrorCode.DRAINING]


async def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_inflight_bytes": 100}) as w:
        with w.dispatcher.reserve(60):
            assert w.metric("spmd_encoder_inflight_bytes") == 60
            with pytest.raises(EncoderError) as caught, w.dispatcher.reserve(41):
                pass
            assert caught.value.code is ErrorCode.OVERLOADED
            assert caught.value.retry_after_s
            with w.dispatcher.reserve(40):
                pass
        with pytest.raises(EncoderError), w.dispatcher.reserve(101):
            pass
        with pytest.raises(ZeroDivisionError), w.dispatcher.reserve(50):
            1 // 0  # noqa: B018
        assert w.metric("spmd_encoder_inflight_bytes") == 0


async def test_close_answers_everybody_and_leaves_nothing_open(tmp_path: Path) -> None:
    tasks = len(asyncio.all_tasks())
    threads = threading.active_count()
    open_files = count_open_files()
    for _ in range(2):
        async with world(tmp_path) as w:
            (scheduler,) = await w.up()
            scheduler.held = True
            task = w.encode(b"aaaa")
            await until(lambda: scheduler.open)  # noqa: B023
        assert await done(task) == [ErrorCode.DRAINING]
        await refused(w.encode(b"bbbb"), ErrorCode.DRAINING)
    await until(lambda: len(asyncio.all_tasks()) == tasks, "no task is left")
    await until(lambda: threading.active_count() == threads)
    await until(lambda: count_open_files() <= open_files + 1, "no file is left open")


async def test_info_is_plain_data_without_secrets(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        await w.up()
        info = w.dispatcher.info()
        assert [entry["state"] for entry in info["replicas"]] == ["ready", "ready"]
        assert info["layout"] == {"world_size": 2, "dp_size": 2, "tp_size": 1}
        assert info["versions"]["torch"] == "2"
        assert info["decoders"] == {"pyav": "1", "video_codecs": ["h264"]}
        assert [process["rank"] for process in info["processes"]] == [0, 1]
        assert w.endpoint.token not in repr(info)
        assert "faults" not in info["config"]
        assert dataclasses.asdict(MODEL) == info["model"]
