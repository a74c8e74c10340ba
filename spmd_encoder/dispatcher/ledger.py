"""The dispatcher's book of jobs: a pure state machine. Events in, commands out; no asyncio, no sockets, no clock.

A job is one item of one request. It waits here until a replica has room (late binding keeps the load even and
makes cancelling cheap), is assigned to one replica at a time, and is resolved exactly once.

When a replica is lost, the jobs that its worker had begun (`suspects`) are retried alone in their batch; those that
merely waited there go back to their place in the queue as they were. `suspicion` says which digests may be where.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spmd_encoder.dispatcher.routing import Load, Policy, least_tokens
from spmd_encoder.dispatcher.suspicion import Suspicion
from spmd_encoder.errors import EncoderError, ErrorCode

_NOT_RUN = frozenset({ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DRAINING})
"""Failures that say nothing of the input."""


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """`pinned`: a probe of this one replica; it takes part in nothing else. An older job has a lower `job_id`."""

    job_id: int
    digest: str
    cost_tokens: int
    deadline: float
    pinned: int | None = None


@dataclass
class _Job:
    new: NewJob
    replica: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class Send:
    """Send these jobs to the replica's scheduler. `alone` says which must run alone."""

    replica: int
    job_ids: tuple[int, ...]
    alone: tuple[bool, ...]


@dataclass(frozen=True)
class Withdraw:
    """Tell the replica's scheduler that these jobs are wanted no more."""

    replica: int
    job_ids: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """Resolve the job with this error."""

    job_id: int
    error: EncoderError
    replica: int | None


@dataclass(frozen=True)
class Deliver:
    """Resolve the job with the result that was just reported."""

    job_id: int
    replica: int


Command = Send | Withdraw | Fail | Deliver


@dataclass
class _Replica:
    ready: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)
    """What it has in hand. A withdrawn job stays, charged and to blame, until the replica has answered or is lost:
    it may still be running."""
    tokens: int = 0
    digests: Counter[str] = field(default_factory=Counter)

    def take(self, job: _Job) -> None:
        self.jobs[job.new.job_id] = job
        self.tokens += job.new.cost_tokens
        self.digests[job.new.digest] += job.new.pinned is None

    def settle(self, job_id: int) -> _Job | None:
        """Take the job off the replica's hands; None where it is not in them (late, or a lie)."""
        if (job := self.jobs.pop(job_id, None)) is not None:
            self.tokens -= job.new.cost_tokens
            self.digests[job.new.digest] -= job.new.pinned is None
            if not self.digests[job.new.digest]:
                del self.digests[job.new.digest]
        return job

    def clear(self) -> None:
        self.jobs.clear()
        self.digests.clear()
        self.tokens = 0


class Ledger:
    """`window_items`, `window_tokens`: most that one replica has in hand at once (one larger item is let through)."""

    def __init__(
        self,
        replicas: Iterable[int],
        *,
        max_items: int,
        window_items: int,
        window_tokens: int,
        quarantine_s: float = 600.0,
        policy: Policy = least_tokens,
    ) -> None:
        self._replicas = {replica: _Replica() for replica in replicas}
        self._max_items = max_items
        self._window_items = window_items
        self._window_tokens = window_tokens
        self._suspicion = Suspicion(quarantine_s)
        self._policy = policy
        self._jobs: dict[int, _Job] = {}
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._turn = 0
        self.retried = 0

    # -- questions

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def num_items(self) -> int:
        """Jobs of callers: all but probes."""
        return sum(job.new.pinned is None for job in self._jobs.values())

    def load(self, replica: int) -> Load:
        entry = self._replicas[replica]
        return Load(entry.tokens, len(entry.jobs))

    def room(self) -> int:
        return max(0, self._max_items - len(self._jobs))

    # -- events

    def submit(self, jobs: Sequence[NewJob], now: float) -> list[Command]:
        """Take all of a request's jobs, or raise EncoderError QUEUE_FULL and take none."""
        if len(jobs) > self.room():
            raise EncoderError(
                ErrorCode.QUEUE_FULL,
                f"{len(self._jobs)} items are in hand and {len(jobs)} more would pass the limit of {self._max_items} "
                "(--max-queued-items); try again later",
            )
        commands: list[Command] = []
        for job in jobs:
            self._jobs[job.job_id] = _Job(job)
            if self._suspicion.is_refused(job.digest, now):
                commands.append(self._give_up(job.job_id, None))
            else:
                self._waiting[job.job_id] = None
        return commands + self._assign()

    def probe(self, job: NewJob) -> list[Command]:
        """Send a probe to its replica, ready or not."""
        assert job.pinned is not None
        self._jobs[job.job_id] = _Job(job)
        return [self._hand_over(job.pinned, [job.job_id])]

    def replica_ready(self, replica: int) -> list[Command]:
        self._replicas[replica].ready = True
        return self._assign()

    def replica_away(self, replica: int) -> None:
        """The replica gets nothing new; what it has in hand is settled by `replica_lost`."""
        self._replicas[replica].ready = False

    def replica_lost(self, replica: int, suspects: Iterable[int] | None, now: float) -> list[Command]:
        """The replica's workers are gone. `suspects` None: nobody knows, so all of its jobs are suspected."""
        entry = self._replicas[replica]
        entry.ready = False
        lost = sorted(job_id for job_id in entry.jobs if job_id in self._jobs)
        suspected = entry.jobs.keys() & (entry.jobs.keys() if suspects is None else set(suspects))
        blamed: dict[str, bool] = {}
        for job in (entry.jobs[job_id] for job_id in suspected):
            if job.new.pinned is None:
                blamed[job.new.digest] = blamed.get(job.new.digest, False) or job.alone
        for digest, alone in blamed.items():
            self._suspicion.died(digest, now, alone=alone)
        entry.clear()
        commands: list[Command] = []
        for job_id in lost:
            job = self._jobs[job_id]
            job.replica = None
            if job.new.pinned is not None:
                error = EncoderError(ErrorCode.WORKER_DIED, "the probed replica was lost")
                commands.append(self._resolve_failed(job_id, error, replica))
            elif self._suspicion.is_refused(job.new.digest, now):
                commands.append(self._give_up(job_id, replica))
            else:
                job.alone = job.alone or job_id in suspected
                self.retried += 1
                self._waiting[job_id] = None
        # Oldest first, also where several replicas were lost one after another.
        self._waiting = OrderedDict.fromkeys(sorted(self._waiting))
        commands += self._refuse_waiting(now)
        return commands + self._assign()

    def completed(self, replica: int, job_id: int) -> list[Command]:
        if (job := self._replicas[replica].settle(job_id)) is None:
            return []
        self._suspicion.answered(job.new.digest)
        delivered: list[Command] = [Deliver(job_id, replica)] if self._jobs.pop(job_id, None) else []
        return delivered + self._assign()

    def failed(self, replica: int, job_id: int, error: EncoderError) -> list[Command]:
        if (job := self._replicas[replica].settle(job_id)) is None:
            return []
        if error.code not in _NOT_RUN:
            self._suspicion.answered(job.new.digest)
        failed: list[Command] = [self._resolve_failed(job_id, error, replica)] if job_id in self._jobs else []
        return failed + self._assign()

    def cancel(self, job_ids: Iterable[int]) -> list[Command]:
        """The caller has gone: nothing is resolved, nothing is started any more."""
        return self._withdraw([job_id for job_id in job_ids if job_id in self._jobs]) + self._assign()

    def tick(self, now: float) -> list[Command]:
        """Resolve what is past its deadline; forget old suspicions."""
        self._suspicion.tick(now)
        late = [job_id for job_id, job in self._jobs.items() if job.new.deadline <= now]
        replica_of = {job_id: self._jobs[job_id].replica for job_id in late}
        commands = self._withdraw(late)
        error = EncoderError(ErrorCode.DEADLINE_EXCEEDED, "the result was not there in time (--request-timeout-s)")
        commands += [Fail(job_id, error, replica_of[job_id]) for job_id in late]
        return commands + self._assign()

    def fail_all(self, error: EncoderError) -> list[Command]:
        """Resolve everything (the drain's deadline has passed)."""
        everything = list(self._jobs)
        return [*self._withdraw(everything), *(Fail(job_id, error, None) for job_id in everything)]

    # -- parts

    def _assign(self) -> list[Command]:
        chosen: dict[int, list[int]] = {}
        for job_id in list(self._waiting):
            job = self._jobs[job_id]
            free = [r for r, entry in self._replicas.items() if self._has_room(entry, job)]
            if not free:
                break  # first come, first served: nobody overtakes the oldest
            candidates = [replica for replica in free if self._may_go(job, replica)]
            if not candidates:
                continue  # it waits for a copy of itself, which is nobody else's concern
            replica = self._policy(candidates, {r: self.load(r) for r in candidates}, self._turn)
            self._turn += 1
            del self._waiting[job_id]
            chosen.setdefault(replica, []).append(job_id)
            self._take(replica, job_id)
        return [self._send(replica, job_ids) for replica, job_ids in chosen.items()]

    def _has_room(self, entry: _Replica, job: _Job) -> bool:
        if not entry.ready or len(entry.jobs) >= self._window_items:
            return False
        return not entry.jobs or entry.tokens + job.new.cost_tokens <= self._window_tokens

    def _may_go(self, job: _Job, replica: int) -> bool:
        digest = job.new.digest
        if self._suspicion.is_proven(digest):
            return True
        holders = [r for r, entry in self._replicas.items() if entry.digests[digest]]
        return not holders or (holders == [replica] and not self._suspicion.is_suspect(digest))

    def _hand_over(self, replica: int, job_ids: list[int]) -> Send:
        for job_id in job_ids:
            self._take(replica, job_id)
        return self._send(replica, job_ids)

    def _take(self, replica: int, job_id: int) -> None:
        job = self._jobs[job_id]
        job.replica = replica
        job.alone = job.alone or (job.new.pinned is None and self._suspicion.is_suspect(job.new.digest))
        self._replicas[replica].take(job)

    def _send(self, replica: int, job_ids: list[int]) -> Send:
        return Send(replica, tuple(job_ids), tuple(self._jobs[job_id].alone for job_id in job_ids))

    def _withdraw(self, job_ids: Iterable[int]) -> list[Command]:
        told: dict[int, list[int]] = {}
        for job_id in job_ids:
            job = self._jobs.pop(job_id)
            self._waiting.pop(job_id, None)
            if job.replica is not None:
                told.setdefault(job.replica, []).append(job_id)
        return [Withdraw(replica, tuple(ids)) for replica, ids in told.items()]

    def _refuse_waiting(self, now: float) -> list[Command]:
        """Resolve the jobs that wait with a digest that has just killed its second worker."""
        doomed = [j for j in self._waiting if self._suspicion.is_refused(self._jobs[j].new.digest, now)]
        return [self._give_up(job_id, None) for job_id in doomed]

    def _give_up(self, job_id: int, replica: int | None) -> Fail:
        error = EncoderError(
            ErrorCode.WORKER_DIED,
            "two workers died while this item was being encoded; it is not tried again, and equal items are refused "
            f"for {self._suspicion.quarantine_s:.0f} s",
        )
        return self._resolve_failed(job_id, error, replica)

    def _resolve_failed(self, job_id: int, error: EncoderError, replica: int | None) -> Fail:
        del self._jobs[job_id]
        self._waiting.pop(job_id, None)
        return Fail(job_id, error, replica)
