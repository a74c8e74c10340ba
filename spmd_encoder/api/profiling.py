"""What is asked of every rank's profiler, and what each of them answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spmd_encoder.errors import ErrorCode

MAX_FORWARDS = 32
MAX_FORWARDS_WITH_STACK = 8
"""A recording ends by itself after so many forwards. To put it together takes some 10 us per event, in one call that
keeps all of a process's threads waiting: after a longer recording the worker would look as if it hung, and be replaced.
"""


class ProfileActivity(StrEnum):
    """What is recorded: calls on the CPU, kernels on the GPU, allocations of either."""

    CPU = "CPU"
    GPU = "GPU"
    MEM = "MEM"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """`name` begins the traces' file names and is in no file name yet. `output_dir` must be inside `--profile-dir`;
    where it is None, that folder is taken, or a temporary one. `num_steps`: forwards to record, `limit()` where it is
    None. `activities`: where it is empty, the CPU's, and on a GPU also its own."""

    name: str
    output_dir: str | None = None
    num_steps: int | None = None
    activities: tuple[ProfileActivity, ...] = ()
    with_stack: bool = False
    record_shapes: bool = False

    def limit(self) -> int:
        """The most forwards that may be recorded."""
        return MAX_FORWARDS_WITH_STACK if self.with_stack else MAX_FORWARDS


@dataclass(frozen=True, kw_only=True)
class ProfileOutcome:
    """One rank's answer: the path of its trace (on its own node), or why there is none."""

    rank: int
    dp_rank: int
    tp_rank: int
    path: str = ""
    code: ErrorCode | None = None
    message: str = ""
