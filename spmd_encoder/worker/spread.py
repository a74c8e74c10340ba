"""How a batch is spread over a TP group (`--mm-encoder-tp-mode`): all of it to every rank, each with its share of the
weights, or to each rank its own items, with whole weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_encoder.distributed.collectives import from_leader
from spmd_encoder.models.base import TowerOutput
from spmd_encoder.wire.messages import TensorSpec

Shard = Sequence[TensorSpec]
"""The tensors of one part of a batch."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Spread(Protocol):
    """`group` is the TP group; its rank 0 leads. All ranks call `take` and then `gather`, for every batch."""

    def shares(self, costs: Sequence[int]) -> list[list[int]]:
        """Which items make which shard, by index. A shard may be empty."""
        ...

    def take(
        self, shards: Sequence[Shard], tensors: Sequence[Mapping[str, Tensor]] | None, device: torch.device
    ) -> dict[str, Tensor]:
        """This rank's input on its device, empty where it has no item. The leader alone passes `tensors`."""
        ...

    def gather(self, outputs: list[TowerOutput], shards: Sequence[Shard], device: torch.device) -> list[TowerOutput]:
        """On the leader all outputs, shard after shard; `outputs` are this rank's, on the CPU."""
        ...


class SpreadWeights:
    """One shard, which every rank has; outputs are equal on all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def shares(self, costs: Sequence[int]) -> list[list[int]]:
        return [list(range(len(costs)))]

    def take(
        self, shards: Sequence[Shard], tensors: Sequence[Mapping[str, Tensor]] | None, device: torch.device
    ) -> dict[str, Tensor]:
        (shard,) = shards
        mine = _to(tensors[0], device) if tensors is not None else _empty(shard, device)
        return {spec.name: from_leader(self._group, mine[spec.name]) for spec in shard}

    def gather(self, outputs: list[TowerOutput], shards: Sequence[Shard], device: torch.device) -> list[TowerOutput]:
        return outputs


def share_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Item indices per rank: the dearest item first, each to the rank that has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


class SpreadItems:
    """A shard per rank. No sum is split, so the numbers are those of one rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def shares(self, costs: Sequence[int]) -> list[list[int]]:
        return share_out(costs, self._size)

    def take(
        self, shards: Sequence[Shard], tensors: Sequence[Mapping[str, Tensor]] | None, device: torch.device
    ) -> dict[str, Tensor]:
        if tensors is None:
            mine = _empty(shards[self._rank], device)
            for tensor in mine.values():
                dist.recv(tensor, group=self._group, group_src=0)
            return mine
        for rank, shard in enumerate(shards):
            if rank != self._rank:
                sent = _to(tensors[rank], device)
                for spec in shard:
                    dist.send(sent[spec.name], group=self._group, group_dst=rank)
        return _to(tensors[self._rank], device)

    def gather(self, outputs: list[TowerOutput], shards: Sequence[Shard], device: torch.device) -> list[TowerOutput]:
        if self._rank != 0:
            if outputs:
                self._send(outputs, device)
            return []
        for rank, shard in enumerate(shards):
            if rank != 0 and shard:
                outputs = outputs + self._receive(rank, device)
        return outputs

    def _send(self, outputs: Sequence[TowerOutput], device: torch.device) -> None:
        tokens = torch.cat([out.tokens for out in outputs])
        pooled = [out.pooled for out in outputs if out.pooled is not None]
        width = pooled[0].shape[0] if pooled else 0
        head = torch.tensor([len(outputs), tokens.shape[1], width, _DTYPES.index(tokens.dtype)])
        parts = [head, torch.tensor([len(out.tokens) for out in outputs]), tokens]
        for part in [*parts, torch.stack(pooled)] if pooled else parts:
            dist.send(part.to(device), group=self._group, group_dst=0)

    def _receive(self, rank: int, device: torch.device) -> list[TowerOutput]:
        count, dim, width, code = self._from(rank, (4,), torch.int64, device).tolist()
        rows = self._from(rank, (count,), torch.int64, device).tolist()
        dtype = _DTYPES[code]
        tokens = torch.split(self._from(rank, (sum(rows), dim), dtype, device), rows)
        return TowerOutput.of_batch(tokens, self._from(rank, (count, width), dtype, device) if width else None)

    def _from(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor.cpu()


def _to(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _empty(shard: Shard, device: torch.device) -> dict[str, Tensor]:
    return {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in shard}
