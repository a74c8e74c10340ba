"""A batch of the warm-up, on any rank: what it finds ends the start with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spmd_encoder.errors import StartupError
from spmd_encoder.models.own_code import does_not_suit, failing, is_own


@contextmanager
def trial(flag: str) -> Iterator[None]:
    """Around a rank's part of a batch. `flag` bounds its size; "" is an ordinary batch, which nothing is said of.

    Raises StartupError for memory that runs out, with the flag to lower, and for what the model's own code finds wrong
    with the item. A peer that has gone is neither: trying again helps.
    """
    try:
        yield
    except Exception as error:
        if flag and is_own(error):
            raise does_not_suit(failing(error)) from error
        if not flag or not _ran_out(error):
            raise
        raise StartupError(
            f"memory ran out in the warm-up, in a batch as large as {flag} allows: lower it, or give each replica more "
            "ranks (--tp-size)"
        ) from error


def _ran_out(error: Exception) -> bool:
    # The allocator of CPUs has no exception of its own.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
