"""What goes into the ledger and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_encoder.errors import EncoderError

Key = tuple[str, str]
"""What makes two items the same work: `api.types.item_key`, and the output that is wanted of them."""


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """One item of one request. `pinned`: a probe of this one replica; it takes part in nothing else.

    An older job has a lower `job_id`. `digest` is the item's key (`api.types.item_key`). `held`: there are no bytes, so
    only a replica that holds the result can answer.
    """

    job_id: int
    digest: str
    cost_tokens: int
    deadline: float
    output: str = ""
    pinned: int | None = None
    held: bool = False

    @property
    def key(self) -> Key:
        return self.digest, self.output


@dataclass(frozen=True)
class Send:
    """Send these works to the replica's scheduler.

    For each: `job_ids` names a job that waits for it (all of a work's jobs are about the same bytes), `deadlines` is
    the latest of its jobs', `alone` says whether it must run alone.
    """

    replica: int
    work_ids: tuple[int, ...]
    job_ids: tuple[int, ...]
    deadlines: tuple[float, ...]
    alone: tuple[bool, ...]


@dataclass(frozen=True)
class Withdraw:
    """Tell the replica's scheduler that these works are wanted no more."""

    replica: int
    work_ids: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """Resolve the job with this error."""

    job_id: int
    error: EncoderError
    replica: int | None


@dataclass(frozen=True)
class Deliver:
    """Resolve these jobs with the result that was just reported."""

    job_ids: tuple[int, ...]
    replica: int


Command = Send | Withdraw | Fail | Deliver
