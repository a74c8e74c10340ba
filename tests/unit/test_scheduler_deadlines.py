"""What is late, or known by its digest alone, never reaches the tower; a fake engine, and the loop's own clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.scheduler.batcher import Batcher
from spmd_encoder.scheduler.cache import ResultCache
from spmd_encoder.scheduler.output import EngineOutput
from spmd_encoder.scheduler.scheduler import BatchResult, EncoderScheduler
from spmd_encoder.wire.messages import Completed, Failed, Job, Message


class Engine:
    """Preparing and forwards last until their gate opens."""

    def __init__(self) -> None:
        self.may_prepare, self.may_run = asyncio.Event(), asyncio.Event()
        self.may_prepare.set()
        self.may_run.set()
        self.begun: list[int] = []
        self.error: EncoderError | None = None

    async def prepare(self, job: Job, media: memoryview) -> Any:
        await self.may_prepare.wait()
        return Item()

    async def run(self, jobs: Sequence[Job], items: Sequence[Any]) -> BatchResult:
        self.begun += [job.job_id for job in jobs]
        await self.may_run.wait()
        return BatchResult([self.error or output() for _ in jobs], 0.0)


class Item:
    cost = 1
    key = "k"


def output() -> EngineOutput:
    data = memoryview(b"12345678")
    return EngineOutput(kind=OutputKind.POOLED, shape=(2,), dtype="float32", num_tokens=1, grid=None, data=data)


def job(job_id: int, *, budget_s: float = 100.0, digest: str = "", **more: Any) -> Job:
    fields: dict[str, Any] = {"modality": Modality.IMAGE, "output": OutputKind.POOLED, "cost_tokens": 1} | more
    return Job(job_id=job_id, request_id="r", digest=digest or f"d{job_id}", budget_s=budget_s, **fields)


class Bench:
    def __init__(self, cache_bytes: int) -> None:
        self.engine = Engine()
        self.replies: asyncio.Queue[Message] = asyncio.Queue()
        self.scheduler = EncoderScheduler(
            self.engine,
            Batcher(max_items=1, max_tokens=10, lookahead=1),
            ResultCache(cache_bytes),
            reply=lambda message, _: self.replies.put_nowait(message),
            in_tower=lambda _: None,
        )

    def submit(self, *jobs: Job) -> None:
        self.scheduler.submit(jobs, [memoryview(b"" if job.held else b"media") for job in jobs])

    async def reply(self) -> Completed | Failed:
        message = await asyncio.wait_for(self.replies.get(), 10)
        assert isinstance(message, Completed | Failed)
        return message

    async def late(self) -> tuple[int, str]:
        """A job whose time is over, and where it was."""
        message = await self.reply()
        assert isinstance(message, Failed)
        assert message.code is ErrorCode.DEADLINE_EXCEEDED
        return message.job_id, message.message.partition("stage ")[2].partition(" ")[0]


@asynccontextmanager
async def bench(cache_bytes: int = 0) -> AsyncIterator[Bench]:
    made = Bench(cache_bytes)
    running = asyncio.create_task(made.scheduler.run())
    try:
        yield made
    finally:
        made.scheduler.stop()
        made.engine.may_run.set()
        await asyncio.wait_for(running, 30)


async def test_whose_time_is_over_is_told_at_once_and_where() -> None:
    async with bench() as b:
        b.engine.may_run.clear()
        b.submit(job(1))
        while b.engine.begun != [1]:
            await asyncio.sleep(0)
        b.engine.may_prepare.clear()
        b.submit(job(2, budget_s=0.05), job(3, budget_s=0.02))  # one is in preparation, one waits for it
        assert await b.late() == (3, "queue")
        assert await b.late() == (2, "preprocess")
        b.engine.may_prepare.set()
        b.submit(job(4, budget_s=0.05))  # prepared, behind the forward of 1
        assert await b.late() == (4, "queue")
        assert b.scheduler.stats.dropped == 3
        b.engine.may_run.set()
        assert (await b.reply()).job_id == 1
        b.submit(job(5))
        assert (await b.reply()).job_id == 5
        assert b.engine.begun == [1, 5]


async def test_a_forward_that_has_begun_runs_to_its_end() -> None:
    async with bench() as b:
        b.engine.may_run.clear()
        b.submit(job(1, budget_s=0.02))
        while b.engine.begun != [1]:
            await asyncio.sleep(0)
        begun = time.monotonic()
        while time.monotonic() - begun < 0.05:
            await asyncio.sleep(0.005)
        assert b.replies.empty()
        b.engine.may_run.set()
        assert isinstance(await b.reply(), Completed)


async def test_timers_are_gone_with_their_items() -> None:
    """The loop holds none of the items that are answered."""
    async with bench() as b:
        for job_id in range(5):
            b.submit(job(job_id, budget_s=1000.0))
            await b.reply()
        b.engine.may_prepare.clear()
        b.submit(job(9, budget_s=1000.0))
        b.scheduler.cancel([9])
        await b.reply()
        handles = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert [handle for handle in handles if handle.when() > time.monotonic() + 500 and not handle.cancelled()] == []


async def test_a_digest_alone_is_answered_from_the_cache_or_not_at_all() -> None:
    async with bench(cache_bytes=8) as b:
        b.submit(job(1, digest="x"))
        first = await b.reply()
        b.submit(job(2, digest="x", held=True), job(3, digest="y", held=True))
        hit, miss = await b.reply(), await b.reply()
        assert isinstance(first, Completed)
        assert isinstance(hit, Completed)
        assert (hit.job_id, hit.cached, hit.shape) == (2, True, first.shape)
        assert isinstance(miss, Failed)
        assert (miss.job_id, miss.code) == (3, ErrorCode.NOT_FOUND)
        b.submit(job(4, digest="y"))  # drops x
        await b.reply()
        b.submit(job(5, digest="x", held=True))
        dropped = await b.reply()
        assert isinstance(dropped, Failed)
        assert dropped.code is ErrorCode.NOT_FOUND
        assert b.engine.begun == [1, 4]


async def test_what_came_back_before_it_was_told_to_be_dropped_is_held() -> None:
    async with bench(cache_bytes=8) as b:
        for job_id, digest in ((1, "x"), (2, "y"), (3, "x")):
            b.submit(job(job_id, digest=digest))
            await b.reply()
        assert b.scheduler.heartbeat().evicted == (("y", "pooled"),)


async def test_without_a_cache_nothing_is_held() -> None:
    async with bench(cache_bytes=0) as b:
        for job_id in (1, 2):
            b.submit(job(job_id, digest="x"))
            reply = await b.reply()
            assert isinstance(reply, Completed)
            assert not reply.cached
        assert b.engine.begun == [1, 2]
        stats = b.scheduler.heartbeat().stats
        assert (stats.cache_hits, stats.cache_misses, stats.cache_entries) == (0, 0, 0)


async def test_failures_are_never_held() -> None:
    async with bench(cache_bytes=100) as b:
        b.engine.error = EncoderError(ErrorCode.NON_FINITE, "NaN")
        b.submit(job(1, digest="x"))
        assert isinstance(await b.reply(), Failed)
        b.submit(job(2, digest="x", held=True))
        miss = await b.reply()
        assert isinstance(miss, Failed)
        assert miss.code is ErrorCode.NOT_FOUND
