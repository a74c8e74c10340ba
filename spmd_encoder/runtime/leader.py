"""A leader's loop: the scheduler between the dispatcher's socket and the TP group."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import assert_never

from spmd_encoder.media.pool import PreparerPool
from spmd_encoder.scheduler.scheduler import EncoderScheduler
from spmd_encoder.wire.messages import Cancel, Encode, Hello, Profile, Profiled, ToScheduler
from spmd_encoder.wire.sockets import DealerSocket
from spmd_encoder.worker.worker import LeaderWorker

HEARTBEAT_S = 0.5


class LeaderLoop:
    def __init__(
        self,
        scheduler: EncoderScheduler,
        dealer: DealerSocket[ToScheduler],
        worker: LeaderWorker,
        pool: PreparerPool,
        hello: Hello,
    ) -> None:
        self._scheduler = scheduler
        self._dealer = dealer
        self._worker = worker
        self._pool = pool
        self._hello = hello

    @property
    def last_order(self) -> int:
        return self._worker.last_order

    @property
    def preparers(self) -> tuple[int, ...]:
        return self._pool.pids

    async def serve(self) -> None:
        self._dealer.send(self._hello)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scheduler.run())
            group.create_task(self._dealer.listen(partial(self._take, group)))
            group.create_task(self._heartbeat())
            group.create_task(self._worker.listen())

    def stop(self) -> None:
        self._scheduler.stop()
        self._worker.stop()

    def _take(self, group: asyncio.TaskGroup, message: ToScheduler, frames: list[memoryview]) -> None:
        match message:
            case Encode():
                self._scheduler.submit(message.jobs, frames)
            case Cancel():
                self._scheduler.cancel(message.job_ids)
            case Profile():
                group.create_task(self._profile(message))
            case _:
                assert_never(message)

    async def _profile(self, message: Profile) -> None:
        """Beside the scheduler: it waits for the batch that runs, and for no other."""
        outcomes = await self._worker.profile(message.start)
        self._dealer.send(Profiled(call_id=message.call_id, outcomes=tuple(outcomes)))

    async def _heartbeat(self) -> None:
        while True:
            self._dealer.send(self._scheduler.heartbeat(self._worker.compute_cpu_s))
            await asyncio.sleep(HEARTBEAT_S)
