"""torch.distributed as this server uses it: the store, the start's agreement, one TP group per replica and epoch.

Groups are built on an own key prefix each time: the launcher's store outlives a restart and would hand out the
addresses of the dead. Nothing wider than a replica exists while serving.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import StartupError

KEY_SPACE = "spmd_encoder"


class TorchStore:
    """A torch store with text values, and "" for a missing key (torch's `get` would block)."""

    def __init__(self, store: dist.Store) -> None:
        self.raw = store

    def set(self, key: str, value: str) -> None:
        self.raw.set(key, value)

    def get(self, key: str) -> str:
        return self.raw.get(key).decode() if self.raw.check([key]) else ""

    def compare_set(self, key: str, desired: str) -> str:
        return self.raw.compare_set(key, "", desired).decode()

    def under(self, prefix: str) -> TorchStore:
        return TorchStore(dist.PrefixStore(prefix, self.raw))


def connect_store(host: str, port: int, *, timeout_s: float) -> TorchStore:
    """A client of the world's store. Raises StartupError (exit code 3) when it cannot be reached."""
    try:
        raw = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"cannot reach the rendezvous store at {host}:{port}: {_line(error)}", exit_code=3) from None
    return TorchStore(dist.PrefixStore(KEY_SPACE, raw))


def agree(
    store: TorchStore, layout: Layout, rank: int, *, start_name: str, facts: Mapping[str, str], timeout_s: float
) -> None:
    """Form the world group, split it by `init_device_mesh((dp, tp))`, compare `facts` over the TP and the DP
    subgroup (so that every rank is compared with every other), and end all groups.

    Raises StartupError naming the fact, the two values and their ranks.
    """
    scope = store.under(f"start/{start_name}")
    digests = torch.stack([_digest_tensor(value) for value in facts.values()])
    for name, value in facts.items():
        scope.set(f"fact/{name}/{rank}", value)
    dist.init_process_group(
        "gloo",
        store=scope.under("world").raw,
        rank=rank,
        world_size=layout.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        mesh = init_device_mesh("cpu", (layout.dp_size, layout.tp_size), mesh_dim_names=("dp", "tp"))
        for dimension in ("tp", "dp"):
            group = mesh.get_group(dimension)
            peers = dist.get_process_group_ranks(group)
            seen = [torch.empty_like(digests) for _ in peers]
            dist.all_gather(seen, digests, group=group)
            for peer, theirs in zip(peers, seen, strict=True):
                for row, name in enumerate(facts):
                    if not torch.equal(theirs[row], digests[row]):
                        raise StartupError(
                            f"the ranks disagree on {name}: rank {rank} has {facts[name]!r}, "
                            f"rank {peer} has {scope.get(f'fact/{name}/{peer}')!r}"
                        )
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _digest_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def form_tp_group(store: TorchStore, layout: Layout, rank: int, *, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """This replica's group, as the process's default group. `store` is already under the replica's epoch."""
    _, tp_rank = layout.coordinates(rank)
    dist.init_process_group(
        backend,
        store=store.under("tp").raw,
        rank=tp_rank,
        world_size=layout.tp_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def own_group() -> dist.ProcessGroup:
    """A group of this rank alone. Collective: every rank of the default group calls it."""
    new_subgroups: Any = dist.new_subgroups
    group: dist.ProcessGroup = new_subgroups(1)[0]
    return group


def epoch_scope(store: TorchStore, start_name: str, replica: int, epoch: int) -> TorchStore:
    return store.under(f"start/{start_name}/replica/{replica}/epoch/{epoch}")


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
