"""A scheduler over a fake engine, on a clock that a test moves."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.scheduler.batcher import Batcher
from spmd_encoder.scheduler.cache import ResultCache
from spmd_encoder.scheduler.output import EngineOutput
from spmd_encoder.scheduler.scheduler import BatchResult, EncoderScheduler
from spmd_encoder.wire.messages import Completed, Failed, Job, Message


@dataclass(frozen=True)
class Item:
    job_id: int
    cost: int
    key: object


@dataclass
class FakeEngine:
    """Prepares at once unless `hold_prepare` names the job; a forward lasts until its gate opens."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    batches: list[list[int]] = field(default_factory=list)
    prepared: list[int] = field(default_factory=list)
    hold_prepare: dict[int, asyncio.Event] = field(default_factory=dict)
    prepare_errors: dict[int, Exception] = field(default_factory=dict)
    run_errors: dict[int, EncoderError] = field(default_factory=dict)
    broken: Exception | None = None
    keys: dict[int, str] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    beside: dict[int, set[int]] = field(default_factory=dict)
    """Who was in preparation or in a forward together with a job."""

    def enter(self, job_ids: Sequence[int]) -> None:
        self.inside |= set(job_ids)
        for job_id in self.inside:
            self.beside.setdefault(job_id, set()).update(self.inside - {job_id})

    async def prepare(self, job: Job, media: memoryview) -> Item:
        self.enter([job.job_id])
        try:
            if (event := self.hold_prepare.get(job.job_id)) is not None:
                await event.wait()
            await asyncio.sleep(0)
            assert bytes(media) == b"media %d" % job.job_id
            if (error := self.prepare_errors.get(job.job_id)) is not None:
                raise error
            self.prepared.append(job.job_id)
            return Item(job.job_id, job.cost_tokens, self.keys.get(job.job_id, "k"))
        finally:
            self.inside.discard(job.job_id)

    async def run(self, jobs: Sequence[Job], items: Sequence[Any]) -> BatchResult:
        ids = [job.job_id for job in jobs]
        assert ids == [item.job_id for item in items]
        self.batches.append(ids)
        self.enter(ids)
        await self.gate.wait()
        await asyncio.sleep(0)
        self.inside -= set(ids)
        if self.broken is not None:
            raise self.broken
        return BatchResult([self.run_errors.get(job_id) or output(job_id) for job_id in ids], 0.25)


def output(job_id: int) -> EngineOutput:
    data = memoryview(b"data %d" % job_id)
    return EngineOutput(kind=OutputKind.TOKENS, shape=(1, job_id), dtype="uint8", num_tokens=1, grid=None, data=data)


def job(job_id: int, *, cost: int = 1, budget_s: float = 1000.0, alone: bool = False, **more: Any) -> Job:
    fields: dict[str, Any] = {"modality": Modality.IMAGE, "output": None, "digest": f"d{job_id}"} | more
    return Job(job_id=job_id, request_id=f"r{job_id}", cost_tokens=cost, budget_s=budget_s, alone=alone, **fields)


class Bench:
    def __init__(self, *, max_items: int = 4, max_tokens: int = 100, lookahead: int = 12, cache_bytes: int = 0) -> None:
        self.engine = FakeEngine()
        self.replies: list[tuple[Message, list[bytes]]] = []
        self.in_tower: list[tuple[int, ...]] = []
        """What the keeper was told, in order."""
        self.now = 0.0
        self.scheduler = EncoderScheduler(
            self.engine,
            Batcher(max_items=max_items, max_tokens=max_tokens, lookahead=lookahead),
            ResultCache(cache_bytes),
            reply=lambda message, frames: self.replies.append((message, [bytes(frame) for frame in frames])),
            in_tower=lambda job_ids: self.in_tower.append(tuple(job_ids)),
            clock=lambda: self.now,
        )
        self.running: asyncio.Task[None] = asyncio.create_task(self.scheduler.run())

    def submit(self, *jobs: Job) -> None:
        self.scheduler.submit(jobs, [memoryview(b"media %d" % job.job_id) for job in jobs])

    async def prepare_in(self, seconds: float, job_id: int) -> None:
        """Submit a job that is prepared in so long."""
        self.engine.hold_prepare[job_id] = asyncio.Event()
        self.submit(job(job_id))
        await self.settle()
        self.now += seconds
        self.engine.hold_prepare[job_id].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(60):
            await asyncio.sleep(0)

    @property
    def completed(self) -> list[int]:
        return [message.job_id for message, _ in self.replies if isinstance(message, Completed)]

    @property
    def failed(self) -> dict[int, ErrorCode]:
        return {message.job_id: message.code for message, _ in self.replies if isinstance(message, Failed)}

    def suspects(self) -> set[int]:
        """What the keeper would suspect now; every job comes to the tower once at most, after those before."""
        assert all(bool(now) is not bool(then) for now, then in itertools.pairwise(self.in_tower))
        assert max(Counter(job_id for job_ids in self.in_tower for job_id in job_ids).values(), default=0) <= 1
        return set(self.in_tower[-1]) if self.in_tower else set()


@asynccontextmanager
async def bench(**limits: int) -> AsyncIterator[Bench]:
    made = Bench(**limits)
    try:
        yield made
    finally:
        made.scheduler.stop()
        made.engine.gate.set()
        for event in made.engine.hold_prepare.values():
            event.set()
        try:
            await asyncio.wait_for(made.running, 30)
        except ArithmeticError:
            assert made.engine.broken is not None
        if made.engine.broken is None:
            assert made.suspects() == set()
            stats = made.scheduler.heartbeat().stats
            assert (stats.queue_items, stats.running_items) == (0, 0)
