"""The dispatcher's look-up, items without bytes, times and late answers, over real sockets with fake schedulers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from spmd_encoder.api.types import Embedding, EncodeRequest, ItemFailure, MediaItem, Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.wire.messages import Failed, Heartbeat, SchedulerStats
from tests.harness.dispatcher_world import Scheduler, World, answers, item, until, world

pytestmark = pytest.mark.timeout(30)


def by_digest(data: bytes) -> MediaItem:
    return MediaItem(modality=Modality.IMAGE, data=b"", digest=item(data).digest, held=True)


async def encode(w: World, *items: MediaItem) -> Any:
    return await w.dispatcher.encode(EncodeRequest(request_id="q", items=items))


def held_at(w: World, data: bytes, output: OutputKind | None = None) -> tuple[int, ...]:
    (found,) = w.dispatcher.lookup([item(data).key], output)
    return () if found is None else found.replicas


def drop(scheduler: Scheduler, data: bytes) -> None:
    scheduler.socket.send(Heartbeat(stats=SchedulerStats(), evicted=((item(data).key, "tokens"),)))


async def test_lookup_follows_answers_and_evictions(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        schedulers = await w.up()
        assert held_at(w, b"aaaa") == ()
        (outcome,) = await w.encode(b"aaaa")
        assert held_at(w, b"aaaa") == held_at(w, b"aaaa", OutputKind.TOKENS) == (outcome.replica,)
        assert held_at(w, b"aaaa", OutputKind.POOLED) == ()
        (known,) = w.dispatcher.lookup([item(b"aaaa").key], None)
        assert known is not None
        assert (known.kind, known.shape, known.dtype, known.num_tokens) == (OutputKind.TOKENS, (1, 4), "uint8", 1)
        drop(schedulers[1 - outcome.replica], b"aaaa")
        drop(schedulers[outcome.replica], b"aaaa")
        await until(lambda: held_at(w, b"aaaa") == (), "evicted")


@pytest.mark.parametrize("cache_bytes", [0, 3])
async def test_what_no_cache_keeps_is_not_held(tmp_path: Path, cache_bytes: int) -> None:
    """Off, or smaller than this one result of four bytes."""
    async with world(tmp_path, limits={"cache_bytes": cache_bytes}) as w:
        await w.up()
        await w.encode(b"aaaa")
        assert held_at(w, b"aaaa") == ()


async def test_an_item_without_bytes_goes_to_its_holder(tmp_path: Path) -> None:
    async with world(tmp_path, dp=2) as w:
        schedulers = await w.up()
        (first,) = await w.encode(b"aaaa")
        outcomes = await encode(w, by_digest(b"aaaa"), by_digest(b"unknown"), item(b"bbbb"))
        assert answers(outcomes)[1:] == [ErrorCode.NOT_FOUND, b"bbbb"]
        assert isinstance(outcomes[0], Embedding)
        assert (outcomes[0].replica, outcomes[0].digest) == (first.replica, first.digest)
        last = [job for job in schedulers[first.replica].real_jobs if job.held]
        assert [(job.digest, job.cost_tokens) for job in last] == [(first.digest, 1)]
        assert schedulers[first.replica].media[last[0].job_id] == b""


async def test_dropped_between_lookup_and_use_it_is_not_found_and_with_its_bytes_is_encoded(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        await w.encode(b"aaaa")
        assert held_at(w, b"aaaa") == (0,)
        scheduler.held = True
        asked = asyncio.create_task(encode(w, by_digest(b"aaaa")))
        await until(lambda: scheduler.open, "sent")
        scheduler.socket.send(Failed(job_id=scheduler.open[0].job_id, code=ErrorCode.NOT_FOUND, message="gone"))
        (failure,) = await asked
        assert isinstance(failure, ItemFailure)
        assert failure.error.code is ErrorCode.NOT_FOUND
        assert "send the item itself" in failure.error.message
        scheduler.held = False
        assert answers(await w.encode(b"aaaa")) == [b"aaaa"]


async def test_times_have_all_that_passed_between_call_and_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        asked = w.encode(b"aaaa")
        await until(lambda: scheduler.open, "sent")
        before = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - before < 0.6:  # the fake says that 0.5 s of it were its queue
            await asyncio.sleep(0.01)
        scheduler.release()
        (outcome,) = await asked
        assert outcome.times.queue_s >= 0.5
        assert 0.05 <= outcome.times.transfer_s <= asyncio.get_running_loop().time() - before
        assert w.metric('spmd_encoder_stage_seconds_count{stage="transfer"}') == 1, "the probe has none"


async def test_a_late_item_is_told_by_its_replica_where_its_time_was_over(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_batch_items": 1, "cache_bytes": 0}) as w:
        (scheduler,) = await w.up()
        scheduler.held = True
        first = [w.encode(b"%d" % n, deadline_s=30) for n in range(3)]
        await until(lambda: len(scheduler.open) == 3, "full hands")
        queued, told, untold = w.encode(b"q", deadline_s=0.1), None, None
        (failure,) = await queued
        assert "in the stage queue" in failure.error.message, "no replica had room for it"
        scheduler.release()
        await asyncio.gather(*first)
        scheduler.held = True
        told, untold = w.encode(b"told", deadline_s=0.1), w.encode(b"untold", deadline_s=0.1)
        await until(lambda: len(scheduler.open) == 2, "both sent")
        assert all(0 < job.budget_s <= 0.1 for job in scheduler.open)
        message = "in the stage preprocess"
        (job,) = [job for job in scheduler.open if job.digest == item(b"told").digest]
        scheduler.socket.send(Failed(job_id=job.job_id, code=ErrorCode.DEADLINE_EXCEEDED, message=message))
        assert (await told)[0].error.message == message
        assert "in the stage forward" in (await untold)[0].error.message


async def test_no_time_is_left(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        (scheduler,) = await w.up()
        outcomes = await w.encode(b"aaaa", b"bbbb", deadline_s=-0.1)
        assert answers(outcomes) == [ErrorCode.DEADLINE_EXCEEDED] * 2
        assert "in the stage queue" in outcomes[0].error.message
        assert scheduler.real_jobs == []


async def test_bytes_that_have_no_room_say_when_they_may(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_inflight_bytes": 100}) as w:
        await w.up()
        with w.dispatcher.reserve(60), pytest.raises(EncoderError) as caught, w.dispatcher.reserve(60):
            raise AssertionError("no room")
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after_s is not None
        with w.dispatcher.reserve(100):
            pass


async def test_tokens_have_a_limit_by_default_and_a_flag(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_queued_tokens": 25, "max_batch_items": 1}) as w:
        (scheduler,) = await w.up()  # a picture costs 10
        scheduler.held = True
        asked = w.encode(b"aaaa", b"bbbb")
        await until(lambda: len(scheduler.open) == 2, "sent")
        with pytest.raises(EncoderError, match="--max-queued-tokens") as caught:
            await w.encode(b"cccc")
        assert caught.value.code is ErrorCode.QUEUE_FULL
        assert caught.value.retry_after_s is not None
        assert w.metric("spmd_encoder_tokens_in_hand") == 20
        scheduler.release()
        await asked
        assert w.metric("spmd_encoder_tokens_in_hand") == 0
