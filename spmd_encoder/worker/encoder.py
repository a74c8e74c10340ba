"""MMEncoder: one rank's shard of the model and the one way to run it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_encoder.models.base import FamilyAdapter, TowerOutput
from spmd_encoder.wire.messages import TensorSpec
from spmd_encoder.worker.spread import Shard, Spread


@dataclass(frozen=True)
class ForwardResult:
    outputs: list[TowerOutput]
    forward_s: float


class MMEncoder:
    """Runs on the compute thread of every TP rank, with equal arguments in equal order."""

    def __init__(self, adapter: FamilyAdapter, spread: Spread, device: torch.device) -> None:
        self.adapter = adapter
        self.spread = spread
        self.device = device

    def run(self, shards: Sequence[Shard], tensors: Sequence[Mapping[str, Tensor]] | None) -> ForwardResult:
        """Take this rank's part of the batch from the leader (who passes `tensors` of every shard; the others None) and
        run the forward. On the leader there are the outputs of all items, shard after shard.

        Outputs are on the CPU. Of a GPU only the end is waited for, and what a family reads back of its index tensors
        at the start: pinned inputs are copied while the forward is being queued, its outputs to pinned memory after it.

        Any exception here leaves a group of several ranks out of step: the caller must end the worker.
        """
        started = time.perf_counter()
        with torch.inference_mode():
            batch = self.spread.take(shards, tensors, self.device)
            outputs = [
                TowerOutput(tokens=_fetched(out.tokens), pooled=None if out.pooled is None else _fetched(out.pooled))
                for out in (self.adapter.forward(batch) if batch else ())
            ]
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            outputs = self.spread.gather(outputs, shards, self.device)
        return ForwardResult(outputs, time.perf_counter() - started)


def pinned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in memory that a GPU reads by itself: only from such a copy does the processor not wait."""
    return {name: tensor.pin_memory() for name, tensor in tensors.items()}


def _fetched(tensor: Tensor) -> Tensor:
    """On the CPU; from a GPU not before its stream has been waited for."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
