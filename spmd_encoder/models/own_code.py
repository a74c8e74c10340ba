"""Whose fault an exception is: code that does not suit its input, or the process, its memory, a device or a peer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_encoder.distributed import collectives
from spmd_encoder.errors import StartupError

_NOT_THE_INPUTS = (
    *(MemoryError, OSError, EOFError, SystemError, StartupError),
    *(torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError),
)
_DEVICES = re.compile(r"CUDA|cuDNN|CUBLAS|NCCL|\bHIP\b|DefaultCPUAllocator")
"""In the texts of plain RuntimeErrors of torch."""
_COLLECTIVES = (str(Path(dist.__file__).parent), str(Path(collectives.__file__).parent))
_MOST_CHARACTERS = 300


class ModelFailedError(Exception):
    """A model's own code fails for a batch, and nothing else is the worse for it: the worker can go on."""


def is_own(error: BaseException) -> bool:
    """Whether code that computes with an input raised `error` because of this input or of the checkpoint's settings:
    it will do so again, and the process is as good as before.

    False where the error, or one that it comes of, tells of memory, disks or devices, or came out of a collective,
    which fails with a plain RuntimeError too when a peer has gone.
    """
    return all(
        isinstance(one, Exception)
        and not isinstance(one, _NOT_THE_INPUTS)
        and not _DEVICES.search(str(one))
        and not _came_of_a_collective(one)
        for one in _chain(error)
    )


def in_a_line(error: BaseException) -> str:
    """Its type and the first line of what it says, at most 300 characters of it."""
    first = next(iter(str(error).strip().splitlines()), "")[:_MOST_CHARACTERS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def does_not_suit(where: str, who: str, said: str) -> StartupError:
    """What ends a start in which `who`, a class, fails for an ordinary item. `where` is the checkpoint."""
    return StartupError(
        f"{where}: the code of {who} itself fails in the warm-up, for ordinary items ({said}): config.json or the "
        "processor's file does not suit the model; compare them with the original's, or download them again"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _came_of_a_collective(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_COLLECTIVES):
            return True
        trace = trace.tb_next
    return False
