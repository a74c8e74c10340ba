"""What every TP rank of a replica does: take orders by number, run them on the compute thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from torch import Tensor

from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.wire.messages import RunBatch, StopFollower
from spmd_encoder.worker.compute import ComputeThread
from spmd_encoder.worker.encoder import ForwardResult, MMEncoder, specs_of

T = TypeVar("T")


class LeaderWorker:
    """TP-rank 0: numbers the batches, tells the followers, runs its own part."""

    def __init__(self, encoder: MMEncoder, compute: ComputeThread, channel: LeaderChannel) -> None:
        self._encoder = encoder
        self._compute = compute
        self._channel = channel
        self._next = 0
        self.last_order = -1

    async def execute(
        self, tensors: Mapping[str, Tensor], *, before: Callable[[], None], after: Callable[[ForwardResult], T]
    ) -> T:
        """Run one batch on the whole group. `before` (fault injection) and `after` (checks, conversion to bytes)
        run on the compute thread around the forward."""
        specs, order = specs_of(tensors), self._next
        self._next += 1
        self._channel.send(RunBatch(order=order, tensors=specs))

        def call() -> T:
            before()
            return after(self._encoder.run(specs, tensors))

        result = await self._compute.submit(call)
        self.last_order = order
        return result

    def stop(self) -> None:
        self._channel.send(StopFollower(order=self._next))


class FollowerWorker:
    """The other TP ranks."""

    def __init__(self, encoder: MMEncoder, compute: ComputeThread, channel: FollowerChannel) -> None:
        self._encoder = encoder
        self._compute = compute
        self._channel = channel
        self.last_order = -1

    async def follow(self) -> None:
        """Until the leader says stop. Any exception means that this rank is out of step."""
        while isinstance(order := await self._channel.receive(), RunBatch):
            await self._compute.submit(partial(self._encoder.run, order.tensors, None))
            self.last_order = order.order
