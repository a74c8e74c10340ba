"""Which device and collective backend this rank uses: decided once."""

from __future__ import annotations

import os

import torch

from spmd_encoder.errors import StartupError


def pick_device(wanted: str, local_rank: int) -> tuple[torch.device, str]:
    """(device, process group backend). Raises StartupError where `cuda` is wanted and missing."""
    available = torch.cuda.is_available() if wanted != "cpu" else False
    if wanted == "cuda" and not available:
        raise StartupError("--device cuda: torch sees no CUDA device; use --device cpu")
    if available:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise StartupError(
                f"local rank {local_rank} has no CUDA device of its own: this node has {count}; start fewer ranks per "
                "node, or give --device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device, "nccl"
    return torch.device("cpu"), "gloo"


def set_thread_count(local_world_size: int) -> int:
    """Compute threads of this rank: the node's cores shared out, never oversubscribed."""
    threads = max(1, _num_cores() // local_world_size)
    torch.set_num_threads(threads)
    return threads


def default_preparers(local_world_size: int) -> int:
    """Decoder processes of a leader: half of its share of the node's cores, 1 to 8."""
    return min(8, max(1, _num_cores() // (2 * local_world_size)))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
