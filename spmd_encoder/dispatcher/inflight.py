"""What the dispatcher holds for jobs in hand: their media, the futures of their callers, and the bytes of both."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Embedding, EncodeRequest, HeldResult, ItemOutcome, MediaItem, OutputKind, StageTimes
from spmd_encoder.dispatcher.commands import Send
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.wire.messages import Completed, Encode, Job


@dataclass
class Entry:
    request: EncodeRequest
    item: MediaItem
    output: OutputKind | None
    outcome: asyncio.Future[ItemOutcome]
    opened: float
    sent: float | None = None
    """When its work went to a replica, known of the job that brought the bytes."""


class Jobs:
    """Resolves each job's future exactly once; forgets the job when its caller is done with it."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def open(self, job_id: int, request: EncodeRequest, item: MediaItem, output: OutputKind | None, now: float) -> None:
        self._entries[job_id] = Entry(request, item, output, asyncio.get_running_loop().create_future(), now)

    def future(self, job_id: int) -> asyncio.Future[ItemOutcome]:
        return self._entries[job_id].outcome

    def is_probe(self, job_id: int) -> bool:
        """Whether it is the server's own, and nobody's item."""
        return (entry := self._entries.get(job_id)) is not None and entry.request.probe

    def is_resolved(self, job_id: int) -> bool:
        outcome = self._entries[job_id].outcome
        return outcome.done() and not outcome.cancelled()

    def to_send(self, send: Send, cost: CostTable, now: float) -> tuple[Encode, list[bytes]]:
        """The message of a `Send` command, and its media frames."""
        jobs, frames = [], []
        for work_id, job_id, deadline, alone in zip(
            send.work_ids, send.job_ids, send.deadlines, send.alone, strict=True
        ):
            entry = self._entries[job_id]
            entry.sent = now
            jobs.append(
                Job(
                    job_id=work_id,
                    request_id=entry.request.request_id,
                    modality=entry.item.modality,
                    output=entry.output,
                    digest=entry.item.digest,
                    cost_tokens=cost.tokens(entry.item),
                    budget_s=max(0.0, deadline - now),
                    options=entry.item.options,
                    alone=alone,
                    probe=entry.request.probe,
                    held=entry.item.held,
                )
            )
            frames.append(entry.item.data)
        return Encode(jobs=tuple(jobs)), frames

    def close(self, job_id: int) -> None:
        entry = self._entries.pop(job_id, None)
        if entry is not None and not entry.outcome.done():
            entry.outcome.cancel()

    def resolve(self, job_id: int, outcome: ItemOutcome) -> None:
        entry = self._entries.get(job_id)
        if entry is not None and not entry.outcome.done():
            entry.outcome.set_result(outcome)

    def resolve_completed(
        self, job_id: int, message: Completed, replica: int, data: memoryview, now: float
    ) -> StageTimes | None:
        """The job's times; None where its caller has gone."""
        if (entry := self._entries.get(job_id)) is None:
            return None
        carrier = entry if entry.sent is not None else self._entries.get(message.job_id, entry)
        times = _job_times(message.times, entry.opened, carrier.sent, now)
        embedding = Embedding(
            modality=entry.item.modality,
            kind=message.kind,
            shape=message.shape,
            dtype=message.dtype,
            num_tokens=message.num_tokens,
            digest=entry.item.digest,
            data=data,
            grid=message.grid,
            replica=replica,
            times=times,
            details=message.details,
            cached=message.cached,
        )
        self.resolve(job_id, embedding)
        return times


def held_result(message: Completed) -> HeldResult:
    """A result without its data."""
    return HeldResult(
        kind=message.kind,
        shape=message.shape,
        dtype=message.dtype,
        num_tokens=message.num_tokens,
        grid=message.grid,
    )


def _job_times(replica: StageTimes, opened: float, sent: float | None, now: float) -> StageTimes:
    """What the replica says, and what went before and after it. A job that joined a work has that work's times."""
    if sent is None:
        return replica
    there_s = replica.queue_s + replica.preprocess_s + replica.forward_s
    return dataclasses.replace(
        replica,
        queue_s=replica.queue_s + max(0.0, sent - opened),
        transfer_s=max(0.0, now - sent - there_s),
    )


class InflightBytes:
    """A budget of media bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def take(self, num_bytes: int) -> None:
        """Raises `EncoderError` OVERLOADED where it is more than is left."""
        if self.used + num_bytes > self._limit:
            raise EncoderError(
                ErrorCode.OVERLOADED,
                f"{self.used} bytes of media are in flight and {num_bytes} more would pass the limit of "
                f"{self._limit} (--max-inflight-bytes); try again later",
                retry_after_s=1.0,
            )
        self.used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes
