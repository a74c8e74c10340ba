"""Whose fault an exception is: code that does not suit its input, or the process, its memory, a device or a peer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from spmd_encoder.distributed import collectives
from spmd_encoder.errors import StartupError


class ModelFailedError(Exception):
    """A model's own code fails for a batch, and nothing else is the worse for it: the worker can go on. The text is
    `failing`'s, the cause what was raised."""


_NOT_THE_INPUTS = (
    *(MemoryError, OSError, EOFError, SystemError, StartupError),
    ModelFailedError,
    *(torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError),
)
_DEVICES = re.compile(r"CUDA|\bcu[A-Z]|\bCU[A-Z]+_|NCCL|\bHIP\b|MIOpen|DefaultCPUAllocator")
"""In the texts of plain RuntimeErrors of torch."""
_COLLECTIVES = (str(Path(dist.__file__).parent), str(Path(collectives.__file__).parent))
_MOST_CHARACTERS = 300


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
        and not came_of_a_collective(one)
        for one in _chain(error)
    )


def in_a_line(error: BaseException) -> str:
    """Its type and the first line of what it says, at most 300 characters of it."""
    first = next(iter(str(error).strip().splitlines()), "")[:_MOST_CHARACTERS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def failing(error: BaseException) -> str:
    """Whose code failed, and how. It is told to who runs the server, and not to clients."""
    return f"the code of {class_of(error) or 'the model'} fails ({in_a_line(error)})"


def does_not_suit(said: str) -> StartupError:
    """What ends a start in which a model's own code fails, as `said`, for what any model should take."""
    return StartupError(
        f"{said} for an ordinary item of the warm-up: config.json or the processor's file does not suit the model; "
        "compare them with the original's, or download them again"
    )


def came_of_a_collective(error: BaseException) -> bool:
    """Whether `error` was raised in a collective: by a peer that has gone, most of all."""
    return any(frame.f_code.co_filename.startswith(_COLLECTIVES) for frame in _frames(error))


def class_of(error: BaseException) -> str:
    """The innermost of transformers' modules that was at work, else of those here that replace one, or ""."""
    owners = [frame.f_locals.get("self") for frame in _frames(error)]
    modules = [type(one) for one in reversed(owners) if isinstance(one, nn.Module)]
    own = (cls for origin in ("transformers.", "spmd_encoder.") for cls in modules if cls.__module__.startswith(origin))
    return next((cls.__name__ for cls in own), "")


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__
