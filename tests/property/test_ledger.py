"""The ledger against a model that knows only which jobs share a work, and where each work is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spmd_encoder.api.types import HeldResult, OutputKind
from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, Key, NewJob, Send, Withdraw
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.ledger import HIT_TOKENS, Ledger
from spmd_encoder.errors import EncoderError, ErrorCode

QUARANTINE_S = 20.0
KEPT = HeldResult(kind=OutputKind.TOKENS, shape=(1, 2), dtype="float32", num_tokens=1, grid=None)
WAITING = None
digests = st.sampled_from("abc")
outputs = st.sampled_from(["tokens", "pooled"])
costs = st.integers(1, 14)
some_held = st.sampled_from([False, False, False, True])


@dataclass
class Known:
    """A work. One without jobs is a ghost: withdrawn, but its replica has not answered yet and may still be at it."""

    first: NewJob
    jobs: dict[int, float] = field(default_factory=dict)
    place: int | None = WAITING
    alone: bool = False
    charged: int = 0
    told: float = 0.0

    @property
    def digest(self) -> str:
        return self.first.digest

    @property
    def counts(self) -> bool:
        """Probes are nobody's input."""
        return self.first.pinned is None

    @property
    def is_input(self) -> bool:
        return self.counts and not self.first.held


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        replicas=st.integers(1, 3),
        max_items=st.integers(1, 9),
        window=st.integers(1, 3),
        tokens=st.integers(5, 20),
        max_tokens=st.sampled_from([0, 0, 30]),
        known=st.sampled_from([0, 2, 100, 100]),
        ready=st.booleans(),
    )
    def begin(
        self, replicas: int, max_items: int, window: int, tokens: int, max_tokens: int, known: int, ready: bool
    ) -> None:
        self.replicas = range(replicas)
        self.window, self.window_tokens, self.max_items = window, tokens, max_items
        self.max_tokens = max_tokens
        self.directory = Directory(known)
        self.ledger = Ledger(
            self.replicas,
            max_items=max_items,
            window_items=window,
            window_tokens=tokens,
            max_tokens=max_tokens,
            quarantine_s=QUARANTINE_S,
            directory=self.directory,
        )
        self.now = 1000.0
        self.next_id = 1
        self.ready: set[int] = set()
        self.works: dict[int, Known] = {}
        self.suspect: dict[str, float] = {}
        self.refused: dict[str, float] = {}
        self.resolved: set[int] = set()
        for replica in self.replicas if ready else ():
            self.ready.add(replica)
            self.expect(self.ledger.replica_ready(replica))

    # -- the model

    def live(self) -> dict[int, Known]:
        return {work_id: work for work_id, work in self.works.items() if work.jobs}

    def jobs(self) -> dict[int, int]:
        """Work by unresolved job."""
        return {job_id: work_id for work_id, work in self.works.items() for job_id in work.jobs}

    def at(self, replica: int) -> dict[int, Known]:
        return {work_id: work for work_id, work in self.works.items() if work.place == replica}

    def placed(self) -> dict[int, Known]:
        return {work_id: work for work_id, work in self.works.items() if work.place is not WAITING}

    def waiting(self) -> list[int]:
        return sorted(work_id for work_id, work in self.works.items() if work.place is WAITING)

    def tokens(self, replica: int) -> int:
        return sum(work.charged for work in self.at(replica).values())

    def is_refused(self, digest: str) -> bool:
        return self.refused.get(digest, self.now) > self.now

    def holders(self, digest: str) -> set[int | None]:
        return {w.place for w in self.works.values() if w.digest == digest and w.is_input} - {WAITING}

    def may_go(self, work: Known, replica: int) -> bool:
        if work.first.held:
            return replica in self.directory.holders(work.first.key)
        there = self.holders(work.digest)
        return not there or (there == {replica} and work.digest not in self.suspect)

    def cost(self, work: Known, replica: int) -> int:
        return HIT_TOKENS if replica in self.directory.holders(work.first.key) else work.first.cost_tokens

    def unheld(self) -> list[int]:
        """Jobs without bytes whose result nobody holds any more."""
        works = [w for w in self.works.values() if w.first.held and w.place is WAITING]
        return [job_id for w in works if not self.directory.holders(w.first.key) for job_id in w.jobs]

    def has_room(self, work: Known, replica: int) -> bool:
        in_hand = len(self.at(replica))
        fits = not in_hand or self.tokens(replica) + self.cost(work, replica) <= self.window_tokens
        return replica in self.ready and in_hand < self.window and fits

    def answered(self, work: Known) -> None:
        if not work.first.held:
            self.suspect.pop(work.digest, None)

    def resolve(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            assert job_id not in self.resolved, "resolved twice"
            self.resolved.add(job_id)
            if (work_id := self.jobs().get(job_id)) is not None:
                del self.works[work_id].jobs[job_id]

    def drop_what_nobody_wants(self) -> dict[int, set[int]]:
        """What has to be withdrawn, by replica; the rest of it is forgotten."""
        withdraws: dict[int, set[int]] = {}
        for work_id, work in list(self.works.items()):
            if not work.jobs and work.place is WAITING:
                del self.works[work_id]
            elif not work.jobs and work.place is not None and work_id not in self.ghosts:
                withdraws.setdefault(work.place, set()).add(work_id)
        self.ghosts |= {work_id for ids in withdraws.values() for work_id in ids}
        return withdraws

    @property
    def ghosts(self) -> set[int]:
        return self.__dict__.setdefault("_ghosts", set())

    @ghosts.setter
    def ghosts(self, value: set[int]) -> None:
        self.__dict__["_ghosts"] = value

    def expect(
        self,
        commands: Sequence[Command],
        *,
        fails: dict[int, ErrorCode] | None = None,
        delivers: Sequence[int] = (),
        withdraws: dict[int, set[int]] | None = None,
    ) -> None:
        """Exactly these resolutions and withdrawals happened, and every Send is lawful."""
        unheld = self.unheld()
        self.resolve(unheld)
        assert self.drop_what_nobody_wants() == {}
        fails = (fails or {}) | dict.fromkeys(unheld, ErrorCode.NOT_FOUND)
        failed = [command for command in commands if isinstance(command, Fail)]
        assert sorted(f.job_id for f in failed) == sorted(fails)
        assert {f.job_id: f.error.code for f in failed} == fails
        delivered = [job_id for c in commands if isinstance(c, Deliver) for job_id in c.job_ids]
        assert sorted(delivered) == sorted(delivers)
        withdrawn = [(c.replica, set(c.work_ids)) for c in commands if isinstance(c, Withdraw)]
        assert len(withdrawn) == len(dict(withdrawn))
        assert dict(withdrawn) == (withdraws or {})

        sends = [command for command in commands if isinstance(command, Send)]
        assert len({send.replica for send in sends}) == len(sends)
        for send in sends:
            assert send.replica in self.ready, "sent to a replica that is not ready"
            assert list(send.work_ids) == sorted(set(send.work_ids))
            for work_id, job_id, deadline, alone in zip(
                send.work_ids, send.job_ids, send.deadlines, send.alone, strict=True
            ):
                work = self.works[work_id]
                assert work.place is WAITING, "in two hands at once"
                assert job_id in work.jobs, "the bytes of a caller who has gone"
                assert deadline == max(work.jobs.values())
                assert self.may_go(work, send.replica), "two workers could die of it at once"
                assert alone == (work.alone or (work.is_input and work.digest in self.suspect))
                work.charged = self.cost(work, send.replica)
                work.place, work.alone, work.told = send.replica, alone, deadline
            in_hand = len(self.at(send.replica))
            assert in_hand <= self.window
            assert in_hand == 1 or self.tokens(send.replica) <= self.window_tokens
        sent = [work_id for send in sends for work_id in send.work_ids]
        for work_id in self.waiting():
            work = self.works[work_id]
            held_back = work.first.held or self.holders(work.digest)
            assert held_back or work_id > max(sent, default=0), "the oldest was overtaken"

    def new_job(
        self, digest: str, output: str, cost: int, ttl: float, held: bool = False, pinned: int | None = None
    ) -> NewJob:
        job = NewJob(
            job_id=self.next_id,
            digest=digest,
            output=output,
            cost_tokens=HIT_TOKENS if held else cost,
            deadline=self.now + ttl,
            pinned=pinned,
            held=held,
        )
        self.next_id += 1
        return job

    # -- events

    @rule(items=st.lists(st.tuples(digests, outputs, costs, st.integers(1, 60), some_held), min_size=1, max_size=5))
    def submit(self, items: list[tuple[str, str, int, int, bool]]) -> None:
        new = [self.new_job(*item) for item in items]
        unresolved = sum(self.works[work_id].counts for work_id in self.jobs().values())
        assert self.ledger.room() == max(0, self.max_items - unresolved)
        joined, tokens = self.ledger.joined, self.ledger.num_tokens
        wanted, most = sum(job.cost_tokens for job in new), self.max_tokens or 10**9
        try:
            commands = self.ledger.submit(new, self.now)
        except EncoderError as error:
            never = len(new) > self.max_items or (len(new) + unresolved <= self.max_items and wanted > most)
            assert error.code is (ErrorCode.TOO_LARGE if never else ErrorCode.QUEUE_FULL)
            assert unresolved + len(new) > self.max_items or tokens + wanted > most
            return
        assert unresolved + len(new) <= self.max_items
        assert tokens + wanted <= most
        fails = {job.job_id: ErrorCode.WORKER_DIED for job in new if self.is_refused(job.digest)}
        joins = 0
        for job in new:
            if job.job_id in fails:
                continue
            open_works = [w for w in self.live().values() if w.is_input and w.first.key == job.key and not job.held]
            assert len(open_works) <= 1, "the same work twice"
            joins += len(open_works)
            work = open_works[0] if open_works else self.works.setdefault(job.job_id, Known(job))
            work.jobs[job.job_id] = job.deadline
        assert self.ledger.joined - joined == joins
        self.resolve(fails)
        self.expect(commands, fails=fails)

    @rule(data=st.data())
    def replica_ready(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        self.ready.add(replica)
        self.expect(self.ledger.replica_ready(replica))

    @rule(data=st.data())
    def replica_away(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        self.ready.discard(replica)
        self.ledger.replica_away(replica)

    @rule(data=st.data(), foreign=st.sets(st.integers(1, 40), max_size=4), known=st.booleans())
    def replica_lost(self, data: st.DataObject, foreign: set[int], known: bool) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        in_hand = self.at(replica)
        named = data.draw(st.sets(st.sampled_from(sorted(in_hand)))) | foreign if in_hand and known else foreign
        suspects = named & in_hand.keys() if known else set(in_hand)
        self.ready.discard(replica)
        blamed = [in_hand[work_id] for work_id in suspects if in_hand[work_id].is_input]
        for digest in {work.digest for work in blamed}:
            alone = any(work.alone for work in blamed if work.digest == digest)
            if alone and self.suspect.pop(digest, None):
                self.refused[digest] = self.now + QUARANTINE_S
            else:
                self.suspect[digest] = self.now + QUARANTINE_S
        fails: dict[int, ErrorCode] = {}
        for work_id, work in in_hand.items():
            work.place = WAITING
            work.alone = work.alone or work_id in suspects
            if not work.counts:
                fails |= dict.fromkeys(work.jobs, ErrorCode.WORKER_DIED)
        for work in self.works.values():
            if work.place is WAITING and self.is_refused(work.digest):
                fails |= dict.fromkeys(work.jobs, ErrorCode.WORKER_DIED)
        self.resolve(fails)
        self.ghosts -= in_hand.keys()
        assert self.drop_what_nobody_wants() == {}
        self.expect(self.ledger.replica_lost(replica, tuple(named) if known else None, self.now), fails=fails)
        assert all(replica not in self.directory.holders(key) for key in self.keys())

    @rule(data=st.data(), wrong=st.integers(0, 5), ok=st.booleans())
    def reply(self, data: st.DataObject, wrong: int, ok: bool) -> None:
        """A result or a failure; one time in some from a replica that does not have the work in hand."""
        replica = data.draw(st.sampled_from(self.replicas))
        in_hand = self.at(replica)
        work_id = (
            data.draw(st.sampled_from(sorted(in_hand)))
            if in_hand and wrong
            else data.draw(st.integers(0, self.next_id))
        )
        codes = [ErrorCode.MEDIA_CORRUPT, ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NOT_FOUND]
        code = data.draw(st.sampled_from(codes))
        error = EncoderError(code, "broken")
        work = in_hand.get(work_id)
        jobs = dict(work.jobs) if work else {}
        if work is not None:
            if ok or code is ErrorCode.MEDIA_CORRUPT:
                self.answered(work)
            late = code is ErrorCode.DEADLINE_EXCEEDED and not ok
            again = code is ErrorCode.NOT_FOUND and not ok and work.first.held
            self.resolve(j for j, deadline in jobs.items() if not again and (not late or deadline <= work.told))
            work.place = WAITING
            self.ghosts.discard(work_id)
            left = dict(work.jobs)
            assert self.drop_what_nobody_wants() == {}
        else:
            left = {}
        over = [job_id for job_id in jobs if job_id not in left]
        commands = self.ledger.completed(replica, work_id, KEPT) if ok else self.ledger.failed(replica, work_id, error)
        if work is None:
            assert commands == []
        elif ok:
            self.expect(commands, delivers=over)
            if work.counts and len(self.directory):
                assert self.directory.holders(work.first.key)[-1] == replica
        else:
            self.expect(commands, fails=dict.fromkeys(over, code))

    @rule()
    @precondition(lambda self: self.placed())
    def serve(self) -> None:
        """The usual thing: the oldest work in anybody's hands is done."""
        work_id, work = next(iter(sorted(self.placed().items(), key=lambda entry: entry[0])))
        self.complete(work_id, work)

    def complete(self, work_id: int, work: Known) -> None:
        assert work.place is not None
        replica, jobs = work.place, list(work.jobs)
        self.answered(work)
        self.resolve(jobs)
        self.ghosts.discard(work_id)
        del self.works[work_id]
        self.expect(self.ledger.completed(replica, work_id, KEPT), delivers=jobs)

    @rule(data=st.data(), extra=st.lists(st.integers(0, 50), max_size=2, unique=True))
    def cancel(self, data: st.DataObject, extra: list[int]) -> None:
        mine = sorted(j for j, work_id in self.jobs().items() if self.works[work_id].counts)
        chosen = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        for job_id in chosen:
            del self.works[self.jobs()[job_id]].jobs[job_id]
        withdraws = self.drop_what_nobody_wants()
        unknown = {job_id for job_id in extra if job_id not in self.jobs()}
        self.expect(self.ledger.cancel(chosen | unknown), withdraws=withdraws)

    @rule(step=st.sampled_from([0.0, 1.0, 5.0, 25.0]))
    def tick(self, step: float) -> None:
        self.now += step
        for book in (self.suspect, self.refused):
            for digest in [digest for digest, until in book.items() if until <= self.now]:
                del book[digest]
        late = [j for work in self.works.values() for j, deadline in work.jobs.items() if deadline <= self.now]
        self.resolve(late)
        withdraws = self.drop_what_nobody_wants()
        fails = dict.fromkeys(late, ErrorCode.DEADLINE_EXCEEDED)
        self.expect(self.ledger.tick(self.now), fails=fails, withdraws=withdraws)

    @rule(step=st.sampled_from([0.5, 21.0]))
    def time_passes_between_ticks(self, step: float) -> None:
        self.now += step

    @rule(data=st.data(), digest=digests, output=outputs)
    def evicted(self, data: st.DataObject, digest: str, output: str) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        self.expect(self.ledger.evicted(replica, [(digest, output)]))
        assert replica not in self.directory.holders((digest, output))

    @rule(data=st.data(), digest=digests, output=outputs, cost=costs)
    def probe(self, data: st.DataObject, digest: str, output: str, cost: int) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        job = self.new_job(digest, output, cost, 1000.0, pinned=replica)
        (send,) = self.ledger.probe(job)
        assert isinstance(send, Send)
        assert (send.replica, send.work_ids) == (replica, (job.job_id,))
        self.works[job.job_id] = Known(job, {job.job_id: job.deadline}, replica, charged=cost, told=job.deadline)

    @rule()
    @precondition(lambda self: self.next_id > 30)
    def fail_all(self) -> None:
        assume(self.jobs())
        fails = dict.fromkeys(self.jobs(), ErrorCode.DRAINING)
        self.resolve(fails)
        withdraws = self.drop_what_nobody_wants()
        self.expect(self.ledger.fail_all(EncoderError(ErrorCode.DRAINING, "end")), fails=fails, withdraws=withdraws)
        assert self.ledger.num_jobs == 0

    # -- laws

    @invariant()
    def copies_are_in_one_place(self) -> None:
        if hasattr(self, "ledger"):
            assert all(len(self.holders(digest)) <= 1 for digest in "abc")

    @staticmethod
    def keys() -> list[Key]:
        return [(digest, output) for digest in "abc" for output in ("tokens", "pooled")]

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.num_jobs == len(self.jobs())
        counted = [work for work in self.works.values() if work.counts]
        assert self.ledger.num_items == sum(len(work.jobs) for work in counted)
        assert self.ledger.num_tokens >= sum(
            work.first.cost_tokens for work in counted if work.first.job_id in work.jobs
        )
        assert counted or self.ledger.num_tokens == 0
        for replica in self.replicas:
            load = self.ledger.load(replica)
            assert load.outstanding_items == len(self.at(replica))
            assert load.outstanding_tokens == self.tokens(replica)

    @invariant()
    def nothing_waits_beside_a_free_replica(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for work_id in self.waiting():
            work = self.works[work_id]
            free = {replica for replica in self.replicas if self.has_room(work, replica)}
            assert not any(self.may_go(work, replica) for replica in free), "it waits although there is room"
            if not free:
                break  # the younger must not overtake it

    def teardown(self) -> None:
        """With healthy replicas everything left comes to its end."""
        if not hasattr(self, "ledger"):
            return
        for replica in self.replicas:
            self.ready.add(replica)
            self.expect(self.ledger.replica_ready(replica))
        while self.works:
            self.complete(*next(iter(sorted(self.placed().items(), key=lambda entry: entry[0]))))
        assert self.ledger.num_jobs == 0
        assert all(self.ledger.load(r).outstanding_tokens == 0 for r in self.replicas)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
