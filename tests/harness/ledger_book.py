"""A ledger for tests, its events in short, and what its commands say."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_encoder.api.types import HeldResult, OutputKind
from spmd_encoder.dispatcher.commands import Command, Fail, NewJob, Send
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.errors import ErrorCode

KEPT = HeldResult(kind=OutputKind.TOKENS, shape=(1, 2), dtype="float32", num_tokens=1, grid=None)


def ledger(
    replicas: int = 2, *, ready: bool = True, items: int = 4, tokens: int = 100, most: int = 50, known: int = 0
) -> Ledger:
    book = Ledger(
        range(replicas),
        max_items=most,
        window_items=items,
        window_tokens=tokens,
        quarantine_s=600.0,
        directory=Directory(known),
    )
    if ready:
        for replica in range(replicas):
            book.replica_ready(replica)
    return book


def job(
    job_id: int, digest: str | None = None, *, cost: int = 1, deadline: float = 1e9, output: str = "tokens"
) -> NewJob:
    return NewJob(job_id=job_id, digest=digest or f"d{job_id}", cost_tokens=cost, deadline=deadline, output=output)


def sent(replica: int, job_id: int, deadline: float = 1e9) -> Send:
    return Send(replica, (job_id,), (job_id,), (deadline,), (False,))


def placed(commands: Sequence[Command]) -> dict[int, tuple[int, ...]]:
    return {command.replica: command.work_ids for command in commands if isinstance(command, Send)}


def alone(commands: Sequence[Command]) -> dict[int, bool]:
    sends = [command for command in commands if isinstance(command, Send)]
    return {job_id: flag for send in sends for job_id, flag in zip(send.work_ids, send.alone, strict=True)}


def failures(commands: Sequence[Command]) -> dict[int, ErrorCode]:
    return {command.job_id: command.error.code for command in commands if isinstance(command, Fail)}
