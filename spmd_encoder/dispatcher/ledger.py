"""The dispatcher's book of jobs: a pure state machine. Events in, commands out; no asyncio, no sockets, no clock.

A job is one item of one request, resolved exactly once. Equal items that are wanted at the same time are one **work**:
it waits here until a replica has room (late binding keeps the load even and makes cancelling cheap), is in one
replica's hands at a time, and goes on while at least one of its jobs is wanted.

When a replica is lost, the works that its worker had begun (`suspects`) are retried alone in their batch; those that
merely waited there go back to their place in the queue as they were. `suspicion` says which digests are under one.

What a replica holds in its cache costs no forward: such a work (a hit) waits for none, and passes all that does.

A job without bytes (`held`) is a work of its own, which only a replica that holds its result may have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from spmd_encoder.api.types import HeldResult
from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, Key, NewJob, Send, Withdraw
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.hits import WaitingHits
from spmd_encoder.dispatcher.refusals import check_room, gave_up, not_held
from spmd_encoder.dispatcher.routing import Load, Policy, least_tokens
from spmd_encoder.dispatcher.suspicion import Suspicion
from spmd_encoder.dispatcher.work import HIT_TOKENS, Hands, Work
from spmd_encoder.errors import EncoderError, ErrorCode, time_over

_HIT_WINDOWS = 4
"""So many times `window_items` works may be in one replica's hands as hits: it may have dropped what they hope for."""
_NOT_RUN = frozenset(
    (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DRAINING, ErrorCode.NOT_FOUND, ErrorCode.OVERLOADED)
)
"""Failures that say nothing of the input."""


class Ledger:
    """`max_items`, `max_tokens`: most of all jobs together, where `max_tokens` 0 is no bound. `window_items`,
    `window_tokens`: most that one replica has in hand at once (one larger item is let through). `grace_s`: how much
    longer than a job's deadline its replica may take to say where its time was over.
    """

    def __init__(
        self,
        replicas: Iterable[int],
        *,
        max_items: int,
        window_items: int,
        window_tokens: int,
        max_tokens: int = 0,
        grace_s: float = 0.0,
        quarantine_s: float = 600.0,
        directory: Directory | None = None,
        policy: Policy = least_tokens,
    ) -> None:
        self._hands = {replica: Hands() for replica in replicas}
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._grace_s = grace_s
        self._window_items = window_items
        self._window_tokens = window_tokens
        self._policy = policy
        self._suspicion = Suspicion(quarantine_s)
        self._directory = Directory(0) if directory is None else directory
        self._works: dict[int, Work] = {}
        """By job, of all jobs that are not resolved."""
        self._joinable: dict[Key, Work] = {}
        self._waiting: OrderedDict[int, Work] = OrderedDict()
        self._hits = WaitingHits(self._directory)
        """These wait for no room among those that are encoded."""
        self._not_held: list[Work] = []
        """Works without bytes that no replica has the results of."""
        self._turn = 0
        self.num_items = 0
        """Jobs of callers: all but probes."""
        self.num_tokens = 0
        """Their price."""
        self.retried = 0
        self.joined = 0
        self.answered_tokens = 0
        """Price of all works of callers that were encoded: neither probes nor hits tell how fast that goes."""

    # -- questions

    @property
    def num_jobs(self) -> int:
        return len(self._works)

    @property
    def waiting_tokens(self) -> int:
        """Price of what no replica has in hand yet."""
        return sum(work.cost_tokens for work in self._waiting.values()) + HIT_TOKENS * len(self._hits)

    @property
    def is_encoding(self) -> bool:
        """Whether anything is encoded, or waits to be, as far as is known."""
        return bool(self._waiting) or any(hands.encodes for hands in self._hands.values())

    def load(self, replica: int) -> Load:
        return self._hands[replica].load

    def room(self) -> int:
        return max(0, self._max_items - self.num_items)

    def lookup(self, key: Key) -> HeldResult | None:
        """What replicas hold of it in their caches."""
        return self._directory.get(key)

    # -- events

    def submit(self, jobs: Sequence[NewJob], now: float) -> list[Command]:
        """Take all of a request's jobs, or raise EncoderError and take none: QUEUE_FULL, or TOO_LARGE for more than
        would ever fit."""
        tokens = sum(job.cost_tokens for job in jobs)
        check_room(len(jobs), self.num_items, self._max_items, "items", "--max-queued-items")
        if self._max_tokens:
            check_room(tokens, self.num_tokens, self._max_tokens, "encoder tokens", "--max-queued-tokens")
        commands: list[Command] = []
        for job in jobs:
            if self._suspicion.is_refused(job.digest, now):
                commands.append(Fail(job.job_id, gave_up(self._suspicion.quarantine_s), None))
            else:
                self._enter(job)
        return commands + self._assign()

    def probe(self, job: NewJob) -> list[Command]:
        """Send a probe to its replica, ready or not."""
        assert job.pinned is not None
        self._works[job.job_id] = work = Work.of(job)
        self._take(job.pinned, work)
        return [_send(job.pinned, [work])]

    def replica_ready(self, replica: int) -> list[Command]:
        self._hands[replica].ready = True
        return self._assign()

    def replica_away(self, replica: int) -> None:
        """The replica gets nothing new; what it has in hand is settled by `replica_lost`."""
        self._hands[replica].ready = False

    def replica_lost(self, replica: int, suspects: Iterable[int] | None, now: float) -> list[Command]:
        """The replica's workers are gone. `suspects` None: nobody knows, so all of its works are suspected."""
        self._hands[replica].ready = False
        self._directory.forget_replica(replica)
        self._changed({work.key for work in self._hits.of(replica)})
        works = self._hands[replica].drop_all()
        named = {work.work_id for work in works} if suspects is None else set(suspects)
        suspected = [work for work in works if work.work_id in named]
        self._blame([work for work in suspected if work.is_input], now)
        commands: list[Command] = []
        again: list[Work] = []
        for work in works:
            if not work.jobs:
                continue
            work.replica = None
            if work.pinned is not None:
                commands += self._fail(
                    work, EncoderError(ErrorCode.WORKER_DIED, "the probed replica was lost"), replica
                )
            elif self._suspicion.is_refused(work.digest, now):
                commands += self._fail(work, gave_up(self._suspicion.quarantine_s), replica)
            else:
                work.alone = work.alone or work in suspected
                self.retried += len(work.jobs)
                again.append(work)
        self._wait(again)
        waiting = [*self._waiting.values(), *self._hits.all()]
        for work in [w for w in waiting if self._suspicion.is_refused(w.digest, now)]:
            commands += self._fail(work, gave_up(self._suspicion.quarantine_s), None)
        return commands + self._assign()

    def completed(self, replica: int, work_id: int, kept: HeldResult | None = None) -> list[Command]:
        """`kept`: the result, where the replica's cache holds it from now on."""
        if (work := self._hands[replica].settle(work_id)) is None:
            return []
        if not work.held:
            self._suspicion.answered(work.digest)
        if work.pinned is None:
            self.answered_tokens += 0 if work.is_hit else work.charged_tokens
            if kept is not None:
                self._changed(self._directory.learn(work.key, replica, kept))
        jobs = self._close(work)
        delivered: list[Command] = [Deliver(jobs, replica)] if jobs else []
        return delivered + self._assign()

    def failed(self, replica: int, work_id: int, error: EncoderError) -> list[Command]:
        if (work := self._hands[replica].settle(work_id)) is None:
            return []
        if error.code not in _NOT_RUN:
            self._suspicion.answered(work.digest)
        if work.held and error.code is ErrorCode.NOT_FOUND and work.jobs:
            self._directory.forget([work.key], replica)
            self._changed([work.key])
            work.replica = None
            self._wait([work])
            return self._assign()  # to another that holds it, if any
        later = [job_id for job_id, job in work.jobs.items() if job.deadline > work.deadline]
        if error.code is not ErrorCode.DEADLINE_EXCEEDED or not later:
            return [*self._fail(work, error, replica), *self._assign()]
        # The replica knew the time of the earlier jobs only.
        early = [job_id for job_id in work.jobs if job_id not in later]
        work.replica = None
        self._leave(early)
        self._wait([work])
        return [*(Fail(job_id, error, replica) for job_id in early), *self._assign()]

    def cancel(self, job_ids: Iterable[int]) -> list[Command]:
        """These callers have gone: their jobs are not resolved, and what nobody else wants is not started any more."""
        return self._leave([job_id for job_id in job_ids if job_id in self._works]) + self._assign()

    def tick(self, now: float) -> list[Command]:
        """Resolve what is past its deadline; forget old suspicions."""
        self._suspicion.tick(now)
        late = [job_id for job_id, work in self._works.items() if self._time_is_over(work, job_id, now)]
        places = [self._works[job_id].replica for job_id in late]
        commands = self._leave(late)
        for job_id, replica in zip(late, places, strict=True):
            # A replica says by itself what was too late for its forward.
            commands.append(Fail(job_id, time_over("queue" if replica is None else "forward"), replica))
        return commands + self._assign()

    def evicted(self, replica: int, keys: Iterable[Key]) -> list[Command]:
        """The replica's cache has dropped these results: what it has in hand for them is work after all."""
        keys = frozenset(keys)
        self._directory.forget(keys, replica)
        self._changed(keys)
        self._hands[replica].no_hits(keys)
        return self._assign()

    def fail_all(self, error: EncoderError) -> list[Command]:
        """Resolve everything (the drain's deadline has passed)."""
        everything = list(self._works)
        return [*self._leave(everything), *(Fail(job_id, error, None) for job_id in everything)]

    # -- parts

    def _enter(self, job: NewJob) -> None:
        work = None if job.held else self._joinable.get(job.key)
        if work is None:
            work = Work.of(job)
            self._place(work)
            if not job.held:
                self._joinable[job.key] = work
        else:
            work.jobs[job.job_id] = job
            self.joined += 1
        self._works[job.job_id] = work
        self.num_items += 1
        self.num_tokens += job.cost_tokens

    def _wait(self, works: Iterable[Work]) -> None:
        """Back into the queue at their own places: oldest first, whatever happened to them."""
        waiting = len(self._waiting)
        for work in works:
            self._place(work)
        if len(self._waiting) > waiting:
            self._waiting = OrderedDict(sorted(self._waiting.items()))

    def _place(self, work: Work) -> None:
        if self._hits.add(work):
            return
        if work.held:
            self._not_held.append(work)
        else:
            self._waiting[work.work_id] = work

    def _changed(self, keys: Collection[Key]) -> None:
        """Other replicas than before hold these, or none does."""
        works = self._hits.take(keys)
        for key in keys:  # one that somebody wanted before and gave up may have been encoded all the same
            if (work := self._joinable.get(key)) and work.work_id in self._waiting and self._directory.holders(key):
                works.append(self._waiting.pop(work.work_id))
        self._wait(works)

    def _assign(self) -> list[Command]:
        commands: list[Command] = []
        while self._not_held:
            commands += self._fail(self._not_held.pop(), not_held(), None)
        chosen: dict[int, list[Work]] = {}
        for work in list(self._waiting.values()):
            if self._hits.add(work):
                del self._waiting[work.work_id]
                continue
            free = [r for r, hands in self._hands.items() if self._has_room(hands, work.cost_tokens)]
            if not free:
                break  # first come, first served: nobody overtakes the oldest
            candidates = [replica for replica in free if self._may_go(work, replica)]
            if not candidates:
                continue  # it waits for a copy of itself, which is nobody else's concern
            replica = self._choose(candidates)
            if self._is_sooner_elsewhere(work, replica):
                break
            del self._waiting[work.work_id]
            self._take(replica, work)
            chosen.setdefault(replica, []).append(work)
        for holder in self._hands:
            for work in self._hits.of(holder) if self._has_hit_room(holder) else ():
                if candidates := [r for r in self._directory.holders(work.key) if self._may_hit(work, r)]:
                    self._hits.discard(work.work_id)
                    replica = self._choose(candidates)
                    self._take(replica, work, is_hit=True)
                    chosen.setdefault(replica, []).append(work)
                if not self._has_hit_room(holder):
                    break
        return commands + [_send(replica, works) for replica, works in chosen.items()]

    def _choose(self, candidates: list[int]) -> int:
        self._turn += 1
        return self._policy(candidates, {r: self.load(r) for r in candidates}, self._turn - 1)

    def _has_room(self, hands: Hands, cost_tokens: int) -> bool:
        if not hands.ready or hands.encodes >= self._window_items:
            return False
        return not hands.encodes or hands.encode_tokens + cost_tokens <= self._window_tokens

    def _is_sooner_elsewhere(self, work: Work, replica: int) -> bool:
        """Whether one that has no room, of many small works for example, will all the same be done with them and this
        one before `replica` is done with what it has."""
        before = self._hands[replica].tokens - work.cost_tokens
        return any(
            hands.ready and hands.tokens <= before and not self._has_room(hands, work.cost_tokens)
            for other, hands in self._hands.items()
            if other != replica and self._may_go(work, other)
        )

    def _may_hit(self, work: Work, replica: int) -> bool:
        return self._has_hit_room(replica) and self._may_go(work, replica)

    def _has_hit_room(self, replica: int) -> bool:
        hands = self._hands[replica]
        return hands.ready and hands.hits < _HIT_WINDOWS * self._window_items

    def _may_go(self, work: Work, replica: int) -> bool:
        """Copies of a digest, for another output or withdrawn, stay on one replica, and of a suspect there is one: so a
        poison that is sent many times at once meets one worker."""
        if work.held:
            return replica in self._directory.holders(work.key)
        holder = next((r for r, hands in self._hands.items() if hands.digests[work.digest]), None)
        return holder is None or (holder == replica and not self._suspicion.is_suspect(work.digest))

    def _take(self, replica: int, work: Work, *, is_hit: bool = False) -> None:
        work.replica = replica
        work.alone = work.alone or (work.is_input and self._suspicion.is_suspect(work.digest))
        self._hands[replica].take(work, is_hit=is_hit)

    def _blame(self, works: Iterable[Work], now: float) -> None:
        blamed: dict[str, bool] = {}
        for work in works:
            blamed[work.digest] = blamed.get(work.digest, False) or work.alone
        for digest, alone in blamed.items():
            self._suspicion.died(digest, now, alone=alone)

    def _leave(self, job_ids: Iterable[int]) -> list[Command]:
        """Take jobs off their works, and withdraw the works that nobody wants any more."""
        told: dict[int, list[int]] = {}
        for job_id in job_ids:
            work = self._resolve(job_id)
            if not work.jobs:
                self._close(work)
                if work.replica is not None:
                    told.setdefault(work.replica, []).append(work.work_id)
        return [Withdraw(replica, tuple(ids)) for replica, ids in told.items()]

    def _close(self, work: Work) -> tuple[int, ...]:
        """Nobody waits for it from here on; the jobs that did."""
        jobs = tuple(work.jobs)
        for job_id in jobs:
            self._resolve(job_id)
        self._waiting.pop(work.work_id, None)
        self._hits.discard(work.work_id)
        if self._joinable.get(work.key) is work:
            del self._joinable[work.key]
        return jobs

    def _resolve(self, job_id: int) -> Work:
        work = self._works.pop(job_id)
        job = work.jobs.pop(job_id)
        if work.pinned is None:
            self.num_items -= 1
            self.num_tokens -= job.cost_tokens
        return work

    def _time_is_over(self, work: Work, job_id: int, now: float) -> bool:
        grace_s = 0.0 if work.replica is None else self._grace_s
        return work.jobs[job_id].deadline + grace_s <= now

    def _fail(self, work: Work, error: EncoderError, replica: int | None) -> list[Fail]:
        return [Fail(job_id, error, replica) for job_id in self._close(work)]


def _send(replica: int, works: Sequence[Work]) -> Send:
    works = sorted(works, key=lambda work: work.work_id)
    return Send(
        replica,
        work_ids=tuple(work.work_id for work in works),
        job_ids=tuple(next(iter(work.jobs)) for work in works),
        deadlines=tuple(work.deadline for work in works),
        alone=tuple(work.alone for work in works),
    )
