"""What every TP rank of a replica does: take orders by number, run them on the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar, assert_never

from torch import Tensor

from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.models.own_code import ModelFailedError, failing, is_own
from spmd_encoder.wire.orders import ProfileDone, ProfileOrder, RunBatch, StopFollower
from spmd_encoder.worker.compute import ComputeThread
from spmd_encoder.worker.encoder import ForwardResult, MMEncoder, specs_of
from spmd_encoder.worker.profiling import Profiler
from spmd_encoder.worker.trial import trial

T = TypeVar("T")


class LeaderWorker:
    """TP-rank 0: numbers the orders, tells the followers, runs its own part."""

    def __init__(self, encoder: MMEncoder, compute: ComputeThread, channel: LeaderChannel, profiler: Profiler) -> None:
        self._encoder = encoder
        self._compute = compute
        self._channel = channel
        self._profiler = profiler
        self._next = 0
        self._answers: dict[tuple[int, int], asyncio.Future[ProfileOutcome]] = {}  # by order and TP rank
        self.last_order = -1

    @property
    def compute_cpu_s(self) -> float:
        return self._compute.cpu_s

    def shares(self, costs: Sequence[int]) -> list[list[int]]:
        """Which items make which shard of a batch, by index."""
        return self._encoder.spread.shares(costs)

    async def execute(
        self,
        tensors: Sequence[Mapping[str, Tensor]],
        *,
        before: Callable[[], None],
        after: Callable[[ForwardResult], T],
        trial_flag: str = "",
    ) -> T:
        """Run one batch, of which each shard has its `tensors`, on the whole group. `before` (fault injection) and
        `after` (checks, conversion to bytes) run on the compute thread around the forward. `trial_flag`: see
        `worker.trial`.

        Raises ModelFailedError where this rank is the whole group and the model's own code fails for the batch. Any
        other exception leaves the group out of step: the caller must end the worker.
        """
        shards, order = tuple(specs_of(shard) for shard in tensors), self._next
        self._next += 1
        self._channel.send(RunBatch(order=order, shards=shards, trial=trial_flag))

        def call() -> T:
            before()
            with trial(trial_flag):
                try:
                    with self._profiler.forward():
                        result = self._encoder.run(shards, tensors)
                    return after(result)
                except Exception as error:
                    # Of others nobody knows here how far they came with the batch.
                    if self._channel.followers or not is_own(error):
                        raise
                    raise ModelFailedError(failing(error)) from error

        result = await self._compute.submit(call)
        self.last_order = order
        return result

    async def profile(self, start: ProfileOptions | None) -> list[ProfileOutcome]:
        """Start or stop every profiler of the group; one outcome per TP rank. Needs `listen` to run."""
        order = self._next
        self._next += 1
        keys = [(order, tp_rank) for tp_rank in sorted(self._channel.followers)]
        self._answers |= {key: asyncio.get_running_loop().create_future() for key in keys}
        try:
            self._channel.send(ProfileOrder(order=order, start=start))
            own = await self._compute.submit(partial(self._profiler.obey, start))
            self.last_order = order
            return [await asyncio.wrap_future(own), *[await self._answers[key] for key in keys]]
        finally:
            for key in keys:
                del self._answers[key]

    async def listen(self) -> None:
        """What followers answer, for ever."""
        while True:
            tp_rank, done = await self._channel.receive()
            answer = self._answers.get((done.order, tp_rank))
            if answer is not None and not answer.done():
                answer.set_result(done.outcome)

    def stop(self) -> None:
        self._channel.send(StopFollower(order=self._next))


class FollowerWorker:
    """The other TP ranks."""

    def __init__(
        self, encoder: MMEncoder, compute: ComputeThread, channel: FollowerChannel, profiler: Profiler
    ) -> None:
        self._encoder = encoder
        self._compute = compute
        self._channel = channel
        self._profiler = profiler
        self._answering: set[asyncio.Task[None]] = set()
        self.last_order = -1

    async def follow(self) -> None:
        """Until the leader says stop. Any exception means that this rank is out of step."""
        while True:
            order = await self._channel.receive()
            match order:
                case RunBatch():
                    await self._compute.submit(partial(self._run, order))
                case ProfileOrder():
                    outcome = await self._compute.submit(partial(self._profiler.obey, order.start))
                    # The next order does not wait until a trace is written.
                    task = asyncio.create_task(self._answer(order.order, outcome))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                case StopFollower():
                    return
                case _:
                    assert_never(order)
            self.last_order = order.order

    def _run(self, order: RunBatch) -> None:
        with trial(order.trial), self._profiler.forward():
            self._encoder.run(order.shards, None)

    async def _answer(self, order: int, outcome: Future[ProfileOutcome]) -> None:
        self._channel.send(ProfileDone(order=order, outcome=await asyncio.wrap_future(outcome)))
