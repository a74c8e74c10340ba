"""EncoderScheduler: continuous batching on a replica's leader, between the dispatcher's socket and the tower.

Lives on the worker's loop thread. Preparation (decode and preprocess) runs in processes of its own, the forward on
the compute thread; this file only decides and moves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spmd_encoder.api.types import StageTimes, item_key
from spmd_encoder.errors import EncoderError, ErrorCode, time_over
from spmd_encoder.scheduler.batcher import Batcher, Stage
from spmd_encoder.scheduler.cache import Key, ResultCache
from spmd_encoder.scheduler.output import EngineOutput
from spmd_encoder.scheduler.patience import Patience
from spmd_encoder.scheduler.stats import Idle, StatsKeeper
from spmd_encoder.wire.messages import Completed, Failed, Heartbeat, Job, Message

log = logging.getLogger(__name__)


class Prepared(Protocol):
    """A model-ready item, as the engine made it; opaque but for its price and its batch key."""

    @property
    def cost(self) -> int: ...

    @property
    def key(self) -> object: ...


@dataclass(frozen=True)
class BatchResult:
    """`outcomes` holds an output or the item's own failure (for example NON_FINITE), in order."""

    outcomes: Sequence[EngineOutput | EncoderError]
    forward_s: float


class Engine(Protocol):
    """What the scheduler drives; the worker's real one, or a fake in tests."""

    async def prepare(self, job: Job, media: memoryview) -> Prepared: ...

    async def run(self, jobs: Sequence[Job], items: Sequence[Prepared]) -> BatchResult:
        """An exception here means that the replica is out of step and must end."""
        ...


@dataclass
class PendingRequest:
    """One item that the dispatcher entrusted to this replica."""

    job: Job
    media: memoryview
    arrived: float
    deadline: float
    features: Prepared | None = None
    preprocess_s: float = 0.0
    preparing: asyncio.Task[None] | None = field(default=None, repr=False)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class EncoderScheduler:
    """`reply` sends a message (and frames) to the dispatcher. `in_tower` is told which jobs are in the tower from now
    on: whoever finds the worker dead suspects them."""

    def __init__(
        self,
        engine: Engine,
        batcher: Batcher,
        cache: ResultCache,
        *,
        reply: Callable[[Message, Sequence[bytes | memoryview]], None],
        in_tower: Callable[[Sequence[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._cache = cache
        self._reply = reply
        self._in_tower = in_tower
        self._clock = clock
        self._pending: dict[int, PendingRequest] = {}
        self._patience = Patience()
        self._work = asyncio.Event()
        self._stopped = False
        self.stats = StatsKeeper(clock)

    def submit(self, jobs: Sequence[Job], media: Sequence[memoryview]) -> None:
        now = self._clock()
        for job, data in zip(jobs, media, strict=True):
            if self._stopped:
                self._reply(_failed(job, EncoderError(ErrorCode.DRAINING, "the replica is stopping")), ())
            elif not job.probe and (held := self._cache.get(_key(job))) is not None:
                self._reply(_completed(job, held, StageTimes(), cached=True), (held.data,))
            elif job.held:
                self._reply(_failed(job, EncoderError(ErrorCode.NOT_FOUND, "it is not in the cache any more")), ())
            elif job.job_id not in self._pending:
                self._add(job, data, now)
        self._pump()

    def cancel(self, job_ids: Sequence[int]) -> None:
        """A caller that has gone is never started; what runs already runs to its end. Either way the dispatcher gets
        its one reply, upon which it takes the job off this replica's load."""
        for job_id in job_ids:
            if self._batcher.stage(job_id) is not Stage.RUNNING and (pending := self._pending.get(job_id)) is not None:
                self._drop(job_id)
                self._reply(_failed(pending.job, EncoderError(ErrorCode.CANCELLED, "the caller has gone")), ())
        self._pump()

    async def run(self) -> None:
        """Batch after batch, until stopped. An exception of the engine's `run` ends it."""
        while not self._stopped:
            wait_s = self._wait_s()
            taken = [] if wait_s else [self._pending[job_id] for job_id in self._batcher.next_batch()]
            if not taken:
                self.stats.tower.waits(Idle.PREPARATION if self._pending else Idle.EMPTY)
                await self._change(wait_s)
                continue
            batch = self._without_expired(taken)
            self._pump()
            if batch:
                self.stats.tower.batch_began()
                await self._run_batch(batch)
                self._pump()

    def stop(self) -> None:
        """Reject what waits; `run` returns after the batch that runs."""
        self._stopped = True
        for pending in list(self._pending.values()):
            if self._batcher.stage(pending.job.job_id) is not Stage.RUNNING:
                self._fail(pending, EncoderError(ErrorCode.DRAINING, "the replica is stopping"))
        self._work.set()

    def heartbeat(self, compute_cpu_s: float = 0.0) -> Heartbeat:
        """The replica's numbers, with the compute thread's CPU time, and what its cache has dropped since the last
        one. Called on the loop's thread."""
        cache, items = self._cache, self._batcher
        stats = self.stats.snapshot(
            queue_items=items.waiting, running_items=items.running, cache=cache, compute_cpu_s=compute_cpu_s
        )
        return Heartbeat(stats=stats, evicted=cache.take_evicted())

    def _add(self, job: Job, data: memoryview, now: float) -> None:
        self._pending[job.job_id] = pending = PendingRequest(job, data, now, now + job.budget_s)
        self._batcher.add(job.job_id, alone=job.alone)
        pending.timer = asyncio.get_running_loop().call_later(job.budget_s, self._time_is_over, pending)

    def _time_is_over(self, pending: PendingRequest) -> None:
        """What has not begun its forward by now never will."""
        job_id = pending.job.job_id
        if pending.deadline <= self._clock() and self._batcher.stage(job_id) is not Stage.RUNNING:
            self._expire(pending)
            self._pump()

    def _pump(self) -> None:
        while (job_id := self._batcher.next_to_prepare()) is not None:
            pending = self._pending[job_id]
            if pending.deadline <= self._clock():
                self._expire(pending)
                continue
            pending.preparing = asyncio.ensure_future(self._prepare(pending))
        self._work.set()

    async def _prepare(self, pending: PendingRequest) -> None:
        started = self._clock()
        job_id = pending.job.job_id
        self._patience.preparation_began(started)
        try:
            features = await self._engine.prepare(pending.job, pending.media)
        except EncoderError as error:
            self._fail_if_here(job_id, error)
        except Exception as error:
            # Whatever a decoder or processor raises is said of this item alone.
            log.warning("preparing item %s failed: %s", pending.job.digest, type(error).__name__, exc_info=error)
            self._fail_if_here(
                job_id, EncoderError(ErrorCode.MEDIA_CORRUPT, f"cannot be preprocessed ({type(error).__name__})")
            )
        else:
            pending.preprocess_s = self._clock() - started
            pending.features = features
            pending.media = memoryview(b"")
            job = pending.job
            key = ("alone", job_id) if job.alone else (job.modality, features.key, job.output)
            self._batcher.prepared(job_id, key=key, cost=features.cost)
        finally:
            self._patience.preparation_ended(self._clock())
        self._pump()

    def _wait_s(self) -> float:
        """How long what is prepared waits at most for what nearly is; mostly not at all."""
        items, cost, has_room = self._batcher.forming()
        return self._patience.wait_s(self._clock(), items=items, cost=cost) if items and has_room else 0.0

    async def _change(self, at_most_s: float) -> None:
        """Until something has come, been prepared or gone; 0.0 sets no limit."""
        self._work.clear()
        timer = asyncio.get_running_loop().call_later(at_most_s, self._work.set) if at_most_s else None
        await self._work.wait()
        if timer is not None:
            timer.cancel()

    def _without_expired(self, batch: list[PendingRequest]) -> list[PendingRequest]:
        expired = [p for p in batch if p.deadline <= self._clock()]
        self._batcher.finished([p.job.job_id for p in expired])
        for pending in expired:
            self._expire(pending)
        return [p for p in batch if p not in expired]

    async def _run_batch(self, batch: list[PendingRequest]) -> None:
        jobs = [pending.job for pending in batch]
        items = [pending.features for pending in batch if pending.features is not None]
        started = self._clock()
        job_ids = [job.job_id for job in jobs]
        self._in_tower(job_ids)
        result = await self._engine.run(jobs, items)
        self._in_tower(())
        self._patience.forward_ended(sum(item.cost for item in items), result.forward_s)
        self._batcher.finished(job_ids)
        for pending, outcome in zip(batch, result.outcomes, strict=True):
            if isinstance(outcome, EncoderError):
                self._fail(pending, outcome)
                continue
            times = StageTimes(
                queue_s=max(0.0, started - pending.arrived - pending.preprocess_s),
                preprocess_s=pending.preprocess_s,
                forward_s=result.forward_s,
            )
            self._complete(pending, outcome, times)
        asked = [item.cost for job, item in zip(jobs, items, strict=True) if not job.probe]
        if asked:
            self.stats.batch_done(items=len(asked), tokens=sum(asked), forward_s=result.forward_s)
        self.stats.tower.batch_ended(result.forward_s)

    def _complete(self, pending: PendingRequest, output: EngineOutput, times: StageTimes) -> None:
        self._forget(pending.job.job_id)
        if not pending.job.probe:
            self.stats.item_done(times)
        self._reply(_completed(pending.job, output, times), (output.data,))
        if not pending.job.probe:
            self._cache.put(_key(pending.job), output)

    def _fail_if_here(self, job_id: int, error: EncoderError) -> None:
        if (pending := self._pending.get(job_id)) is not None:
            self._fail(pending, error)

    def _fail(self, pending: PendingRequest, error: EncoderError) -> None:
        self._drop(pending.job.job_id)
        if not pending.job.probe:
            self.stats.item_failed()
        self._reply(_failed(pending.job, error), ())

    def _expire(self, pending: PendingRequest) -> None:
        is_preparing = self._batcher.stage(pending.job.job_id) is Stage.PREPARING
        self._drop(pending.job.job_id)
        if not pending.job.probe:
            self.stats.item_dropped()
        self._reply(_failed(pending.job, time_over("preprocess" if is_preparing else "queue")), ())

    def _drop(self, job_id: int) -> None:
        pending = self._forget(job_id)
        self._batcher.remove(job_id)
        if pending.preparing is not None:
            pending.preparing.cancel()

    def _forget(self, job_id: int) -> PendingRequest:
        pending = self._pending.pop(job_id)
        if pending.timer is not None:
            pending.timer.cancel()
        return pending


def _key(job: Job) -> Key:
    return item_key(job.modality, job.digest, job.options), job.output or ""


def _completed(job: Job, output: EngineOutput, times: StageTimes, *, cached: bool = False) -> Completed:
    return Completed(
        job_id=job.job_id,
        kind=output.kind,
        shape=output.shape,
        dtype=output.dtype,
        num_tokens=output.num_tokens,
        grid=output.grid,
        times=times,
        details=output.details,
        cached=cached,
    )


def _failed(job: Job, error: EncoderError) -> Failed:
    return Failed(job_id=job.job_id, code=error.code, message=error.message)
