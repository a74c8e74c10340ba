"""DPDispatcher: the encoder as a service over all replicas. Wires the pure parts (ledger, replica machines,
liveness) to the sockets; decides nothing itself."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, assert_never

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.api.stillness import Stillness
from spmd_encoder.api.types import (
    EncodeRequest,
    HeldResult,
    ItemFailure,
    ItemOutcome,
    MediaItem,
    ModelInfo,
    OutputKind,
    ReadyState,
)
from spmd_encoder.config import Config
from spmd_encoder.dispatcher.admission import Admission
from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, NewJob, Send, Withdraw
from spmd_encoder.dispatcher.describe import describe_software, describe_world
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.fleet import Fleet
from spmd_encoder.dispatcher.inflight import Jobs, held_result
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.dispatcher.metrics import DispatcherMetrics
from spmd_encoder.dispatcher.probe import probe_item
from spmd_encoder.dispatcher.profiling import ProfileCalls
from spmd_encoder.dispatcher.replica import (
    Effect,
    EndWorld,
    ReformReplica,
    ReplicaState,
    SendProbe,
    SettleJobs,
    TakeWork,
)
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import EncoderError, ErrorCode, time_over
from spmd_encoder.wire.messages import (
    Cancel,
    Completed,
    Failed,
    FromKeeper,
    FromScheduler,
    Heartbeat,
    Hello,
    Profiled,
    Reform,
    Stop,
)

log = logging.getLogger(__name__)

TICK_S = 0.05
REPLY_GRACE_S = 0.25
"""How long after an item's deadline its replica may still say in which stage its time was over."""
MAX_KNOWN_RESULTS = 100_000
"""Cached results whose replicas are known; about 500 bytes each."""
WINDOW_BATCHES = 3
"""How many full batches a replica has in hand: one runs, one is being prepared, one is on its way."""


class DPDispatcher:
    """Implements `api.service.EncoderService`. One per world, on the elected rank's keeper."""

    def __init__(self, config: Config, layout: Layout, fleet: Fleet) -> None:
        self._config = config
        self._layout = layout
        self._fleet = fleet
        limits = config.limits
        self._ledger = Ledger(
            layout.replicas,
            max_items=limits.max_queued_items,
            window_items=WINDOW_BATCHES * limits.max_batch_items,
            window_tokens=WINDOW_BATCHES * limits.max_batch_tokens,
            max_tokens=limits.queued_tokens,
            grace_s=REPLY_GRACE_S,
            directory=Directory(MAX_KNOWN_RESULTS if limits.cache_bytes else 0),
        )
        self._jobs = Jobs()
        self._admission = Admission(limits, layout, fleet, self._ledger)
        self._profiles = ProfileCalls(layout, fleet, limits.request_timeout_s)
        self._ids = itertools.count(1)
        self._model: ModelInfo | None = None
        self._cost = CostTable()
        self._decoders: Mapping[str, Any] = {}
        self._started_at = time.monotonic()
        self._ended: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics = DispatcherMetrics(layout.replicas)

    # -- EncoderService

    async def encode(self, request: EncodeRequest) -> Sequence[ItemOutcome]:
        try:
            self._admission.check_open()
        except EncoderError as error:
            self.metrics.refused(error.code)
            raise
        now = time.monotonic()
        limit = self._config.limits.request_timeout_s
        budget = limit if request.deadline_s is None else min(request.deadline_s, limit)
        if budget <= 0:
            for _ in request.items:
                self.metrics.item_failed(ErrorCode.DEADLINE_EXCEEDED)
            return [ItemFailure(error=time_over("queue")) for _ in request.items]
        output = request.output or (self._model.default_output if self._model else None)
        new = [self._new_job(item, now + budget, output=output) for item in request.items]
        for job, item in zip(new, request.items, strict=True):
            self._jobs.open(job.job_id, request, item, output, now)
        futures = [self._jobs.future(job.job_id) for job in new]
        self._admission.coming()
        try:
            self._apply(self._ledger.submit(new, now))
            return await asyncio.gather(*futures)
        except EncoderError as error:
            raise self.request_refused(error) from None
        finally:
            # Cancelled by the caller, or refused: whatever is not resolved is given up.
            left = [job.job_id for job in new if not self._jobs.is_resolved(job.job_id)]
            if left:
                self._apply(self._ledger.cancel(left))
            for job in new:
                self._jobs.close(job.job_id)

    def reserve(self, num_bytes: int) -> AbstractContextManager[None]:
        return self._admission.reserve(num_bytes)

    def lookup(self, keys: Sequence[str], output: OutputKind | None) -> Sequence[HeldResult | None]:
        wanted = output or (self._model.default_output if self._model else "")
        return [self._ledger.lookup((key, wanted)) for key in keys]

    def item_refused(self, code: ErrorCode) -> None:
        self.metrics.item_failed(code)

    def request_refused(self, error: EncoderError) -> EncoderError:
        self.metrics.refused(error.code)
        return self._admission.refusal(error)

    async def profile_start(self, options: ProfileOptions) -> Sequence[ProfileOutcome]:
        self._admission.check_open()
        return await self._profiles.call(options)

    async def profile_stop(self) -> Sequence[ProfileOutcome]:
        return await self._profiles.call(None)

    def ready_state(self) -> ReadyState:
        ready = self._fleet.count(ReplicaState.READY)
        return ReadyState(
            ready=self._admission.started and ready > 0 and not self._admission.draining,
            started=self._admission.started,
            draining=self._admission.draining,
            replicas_ready=ready,
            replicas=self._layout.dp_size,
        )

    def model_info(self) -> ModelInfo | None:
        return self._model

    def info(self) -> Mapping[str, Any]:
        return {
            **describe_software(self._fleet.versions),
            **describe_world(self._config, self._layout),
            "ready": asdict(self.ready_state()),
            "model": asdict(self._model) if self._model else None,
            "cost": asdict(self._cost),
            "decoders": self._decoders,
            "replicas": self._fleet.describe(self._ledger.load),
            "processes": [asdict(process) for process in self._fleet.processes()],
        }

    def metrics_text(self) -> bytes:
        self.metrics.gauges(
            self.ready_state(),
            jobs=self._ledger.num_jobs,
            tokens=self._ledger.num_tokens,
            inflight_bytes=self._admission.inflight_bytes,
            retried=self._ledger.retried,
            joined=self._ledger.joined,
        )
        return self.metrics.text()

    # -- life

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._receive(), name="dispatcher-receive"),
            asyncio.create_task(self._tick(), name="dispatcher-tick"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @property
    def ended(self) -> asyncio.Future[Stop]:
        """Resolved when the world has to end for an inner reason."""
        return self._ended

    async def drain(self, deadline_s: float) -> bool:
        """Accept nothing new, finish what is accepted. False where the deadline cut something off."""
        self._admission.draining = True
        self._fleet.drain()
        end = time.monotonic() + deadline_s
        while self._ledger.num_items and time.monotonic() < end:
            await asyncio.sleep(TICK_S)
        cut = self._ledger.num_items
        self._apply(self._ledger.fail_all(EncoderError(ErrorCode.DRAINING, "the server ended before this was done")))
        if cut:
            log.error("drain deadline of %.0f s passed with %d items unfinished", deadline_s, cut)
        return not cut

    async def stop_world(self, stop: Stop) -> None:
        """Tell every keeper to end its rank."""
        self._fleet.stop_all(stop)
        await self._fleet.flush()

    async def close(self) -> None:
        self._admission.draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._apply(self._ledger.fail_all(EncoderError(ErrorCode.DRAINING, "the server is ending")))
        self._fleet.close()

    def _new_job(
        self, item: MediaItem, deadline: float, *, output: OutputKind | None = None, pinned: int | None = None
    ) -> NewJob:
        return NewJob(
            job_id=next(self._ids),
            digest=item.key,
            output=output or "",
            cost_tokens=self._cost.tokens(item),
            deadline=deadline,
            pinned=pinned,
            held=item.held,
        )

    # -- ledger commands

    def _apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._send(command)
                case Withdraw(replica, work_ids):
                    self._fleet.send(replica, Cancel(job_ids=work_ids))
                case Fail(job_id, error, replica):
                    if not self._jobs.is_probe(job_id):
                        self.metrics.item_failed(error.code)
                    self._jobs.resolve(job_id, ItemFailure(error=error, replica=replica))
                case Deliver():
                    pass  # the caller of `completed` holds the frames and resolves the jobs
                case _:
                    assert_never(command)

    def _send(self, send: Send) -> None:
        message, media = self._jobs.to_send(send, self._cost, time.monotonic())
        self._fleet.send(send.replica, message, media)

    # -- what replicas say

    async def _receive(self) -> None:
        while True:
            received = await self._fleet.receive()
            if received is not None:
                self._on_scheduler(*received)

    def _on_scheduler(self, replica: int, message: FromScheduler, frames: Sequence[memoryview]) -> None:
        match message:
            case Hello():
                self._model, self._cost, self._decoders = message.model, message.cost, message.decoders
                self._effects(replica, self._fleet.hello(replica, message))
            case Completed():
                if not frames:
                    error = EncoderError(ErrorCode.INTERNAL, "the replica sent a result without its tensor")
                    self._apply(self._ledger.failed(replica, message.job_id, error))
                    return
                self._completed(replica, message, frames[0])
            case Failed():
                error = EncoderError(message.code, message.message)
                self._apply(self._ledger.failed(replica, message.job_id, error))
            case Heartbeat():
                self._fleet.heard(replica)
                self.metrics.replica_stats(replica, self._fleet.epoch(replica), message.stats)
                self._apply(self._ledger.evicted(replica, message.evicted))
            case Profiled():
                self._profiles.answered(replica, message)
            case _:
                assert_never(message)

    def _completed(self, replica: int, message: Completed, data: memoryview) -> None:
        now = time.monotonic()
        before = self._ledger.answered_tokens
        kept = held_result(message) if data.nbytes <= self._config.limits.cache_bytes else None
        commands = self._ledger.completed(replica, message.job_id, kept)
        self._admission.answered(self._ledger.answered_tokens - before)
        for job_id in (j for command in commands if isinstance(command, Deliver) for j in command.job_ids):
            times = self._jobs.resolve_completed(job_id, message, replica, data, now)
            if not self._jobs.is_probe(job_id):
                self.metrics.item_completed(times or message.times)
        self._apply(commands)

    def on_keeper(self, message: FromKeeper) -> None:
        for replica, effects in self._fleet.keeper_said(message):
            self._effects(replica, effects)

    def on_keeper_lost(self, rank: int) -> None:
        log.error("the keeper of rank %d is gone", rank)
        replica, effects = self._fleet.keeper_lost(rank)
        self._effects(replica, effects)

    # -- replica effects

    def _effects(self, replica: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReformReplica(epoch, pause_s):
                    reason = self._fleet.reason(replica)
                    log.warning("replica %d is formed anew as epoch %d: %s", replica, epoch, reason)
                    self.metrics.reformed(replica)
                    self._ledger.replica_away(replica)
                    self._fleet.reform(replica, Reform(replica=replica, epoch=epoch, pause_s=pause_s))
                case SettleJobs(suspects):
                    self._apply(self._ledger.replica_lost(replica, suspects, time.monotonic()))
                case SendProbe():
                    self._probe(replica)
                case TakeWork():
                    start_s = ", ".join(f"{name} {s:.2f} s" for name, s in self._fleet.start_s(replica).items())
                    log.info("replica %d is ready (epoch %d): %s", replica, self._fleet.epoch(replica), start_s)
                    self._check_started()
                    self._apply(self._ledger.replica_ready(replica))
                case EndWorld(reason):
                    if not self._ended.done():
                        self._ended.set_result(Stop(exit_code=1, reason=reason))
                case _:
                    assert_never(effect)

    def _check_started(self) -> None:
        if not self._admission.started and self._fleet.all_were_ready():
            self._admission.started = True
            log.info(
                "ready: %d replicas, %.1f s after start", self._layout.dp_size, time.monotonic() - self._started_at
            )

    # -- time

    async def _tick(self) -> None:
        late_start = self._started_at + self._config.lifecycle.start_deadline_s
        stillness = Stillness(TICK_S)
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if (gap_s := stillness.gap_s()) > 0:
                self._fleet.slept(gap_s)
            self._apply(self._ledger.tick(now))
            for replica, effects in self._fleet.check(now):
                self._effects(replica, effects)
            self._profiles.check()
            for replica in self._fleet.idle_too_long(now, self._config.lifecycle.probe_interval_s):
                if not self._admission.draining and not self._ledger.load(replica).outstanding_items:
                    self._probe(replica)
            if not self._admission.started and now > late_start and self._fleet.count(ReplicaState.READY):
                self._admission.started = True

    def _probe(self, replica: int) -> None:
        """Encode the probe picture on this replica through the real path."""
        self._fleet.probed(replica)
        epoch = self._fleet.epoch(replica)
        deadline = time.monotonic() + self._config.lifecycle.batch_timeout_s
        item = probe_item(self._model.modalities if self._model else ())
        job = self._new_job(item, deadline, pinned=replica)
        request = EncodeRequest(request_id=f"probe-{replica}-{job.job_id}", items=(item,), probe=True)
        self._jobs.open(job.job_id, request, item, None, time.monotonic())

        def done(future: asyncio.Future[ItemOutcome]) -> None:
            self._jobs.close(job.job_id)
            if not future.cancelled():
                outcome = future.result()
                error = outcome.error if isinstance(outcome, ItemFailure) else None
                self._effects(replica, self._fleet.probe_done(replica, epoch, error))

        self._jobs.future(job.job_id).add_done_callback(done)
        self._apply(self._ledger.probe(job))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the dispatcher failed", exc_info=error)
            if not self._ended.done():
                self._ended.set_result(Stop(exit_code=1, reason=f"the dispatcher failed: {error!r}"))
