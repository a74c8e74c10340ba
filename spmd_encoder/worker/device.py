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
    threads = max(1, len(os.sched_getaffinity(0)) // local_world_size if hasattr(os, "sched_getaffinity") else 1)
    torch.set_num_threads(threads)
    return threads
