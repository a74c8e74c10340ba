"""A batch of the warm-up, on any rank: memory that runs out in it ends the start, with the flag to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spmd_encoder.errors import StartupError


@contextmanager
def trial(flag: str) -> Iterator[None]:
    """Around a rank's part of a batch. `flag` bounds its size; "" is an ordinary batch, which nothing is said of."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not flag or not _ran_out(error):
            raise
        raise StartupError(
            f"memory ran out in the warm-up, in a batch as large as {flag} allows: lower it, or give each replica more "
            "ranks (--tp-size)"
        ) from error


def _ran_out(error: Exception) -> bool:
    # The allocator of CPUs has no exception of its own.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
