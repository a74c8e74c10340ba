"""The ledger against a model that knows only where each job is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spmd_encoder.dispatcher.ledger import Command, Deliver, Fail, Ledger, NewJob, Send, Withdraw
from spmd_encoder.errors import EncoderError, ErrorCode

QUARANTINE_S = 20.0
WAITING = None
digests = st.sampled_from("abc")
costs = st.integers(1, 14)


@dataclass
class Known:
    job: NewJob
    place: int | None = WAITING
    alone: bool = False


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        replicas=st.integers(1, 3), max_items=st.integers(1, 9), window=st.integers(1, 3), tokens=st.integers(5, 20)
    )
    def begin(self, replicas: int, max_items: int, window: int, tokens: int) -> None:
        self.replicas = range(replicas)
        self.window, self.window_tokens, self.max_items = window, tokens, max_items
        self.ledger = Ledger(
            self.replicas, max_items=max_items, window_items=window, window_tokens=tokens, quarantine_s=QUARANTINE_S
        )
        self.now = 1000.0
        self.next_id = 1
        self.ready: set[int] = set()
        self.jobs: dict[int, Known] = {}
        self.suspect: dict[str, float] = {}
        self.refused: dict[str, float] = {}
        self.proven: set[str] = set()
        self.resolved: set[int] = set()
        self.withdrawn: dict[int, Known] = {}

    # -- the model

    def held(self, replica: int) -> list[int]:
        return [job_id for job_id, known in self.jobs.items() if known.place == replica]

    def waiting(self) -> list[int]:
        return sorted(job_id for job_id, known in self.jobs.items() if known.place is WAITING)

    def ghosts(self, replica: int) -> list[int]:
        """Withdrawn, but the replica has not answered yet: it may still be at them."""
        return [job_id for job_id, known in self.withdrawn.items() if known.place == replica]

    def in_hand(self, replica: int) -> int:
        return len(self.held(replica)) + len(self.ghosts(replica))

    def tokens(self, replica: int) -> int:
        own = sum(self.jobs[job_id].job.cost_tokens for job_id in self.held(replica))
        return own + sum(self.withdrawn[job_id].job.cost_tokens for job_id in self.ghosts(replica))

    def is_refused(self, digest: str) -> bool:
        return self.refused.get(digest, self.now) > self.now

    def holders(self, digest: str) -> set[int | None]:
        """Replicas that have a copy of it in hand (probes are nobody's input)."""
        everything = [*self.jobs.values(), *self.withdrawn.values()]
        return {k.place for k in everything if k.job.digest == digest and k.job.pinned is None} - {WAITING}

    def may_go(self, digest: str, replica: int) -> bool:
        if digest in self.proven:
            return True
        there = self.holders(digest)
        return not there or (there == {replica} and digest not in self.suspect)

    def answered(self, job: NewJob) -> None:
        self.suspect.pop(job.digest, None)
        self.proven.add(job.digest)

    def resolve(self, job_id: int) -> None:
        assert job_id in self.jobs
        assert job_id not in self.resolved
        self.resolved.add(job_id)
        del self.jobs[job_id]

    def expect(
        self,
        commands: Sequence[Command],
        *,
        fails: dict[int, ErrorCode] | None = None,
        delivers: Sequence[int] = (),
        withdraws: dict[int, set[int]] | None = None,
    ) -> None:
        """Exactly these resolutions and withdrawals happened, and every Send is lawful."""
        failed = [command for command in commands if isinstance(command, Fail)]
        assert sorted(f.job_id for f in failed) == sorted(fails or {})
        assert {f.job_id: f.error.code for f in failed} == (fails or {})
        assert [c.job_id for c in commands if isinstance(c, Deliver)] == list(delivers)
        withdrawn = [(c.replica, set(c.job_ids)) for c in commands if isinstance(c, Withdraw)]
        assert len(withdrawn) == len(dict(withdrawn))
        assert dict(withdrawn) == (withdraws or {})
        for job_id in [*(fails or {}), *delivers]:
            self.resolve(job_id)

        sends = [command for command in commands if isinstance(command, Send)]
        assert len({send.replica for send in sends}) == len(sends)
        for send in sends:
            assert send.replica in self.ready, "sent to a replica that is not ready"
            assert len(send.job_ids) == len(send.alone) == len(set(send.job_ids)) > 0
            assert list(send.job_ids) == sorted(send.job_ids)
            for job_id, alone in zip(send.job_ids, send.alone, strict=True):
                known = self.jobs[job_id]
                assert known.place is WAITING, "in two hands at once"
                assert self.may_go(known.job.digest, send.replica), "two workers could die of it at once"
                known.place = send.replica
                assert alone == (known.alone or known.job.digest in self.suspect)
                known.alone = alone
            in_hand = self.in_hand(send.replica)
            assert in_hand <= self.window
            assert in_hand == 1 or self.tokens(send.replica) <= self.window_tokens
        sent = [job_id for send in sends for job_id in send.job_ids]
        for job_id in self.waiting():
            digest = self.jobs[job_id].job.digest
            held_back = digest not in self.proven and self.holders(digest)
            assert held_back or job_id > max(sent, default=0), "the oldest was overtaken"

    def new_job(self, digest: str, cost: int, ttl: float, pinned: int | None = None) -> NewJob:
        job = NewJob(job_id=self.next_id, digest=digest, cost_tokens=cost, deadline=self.now + ttl, pinned=pinned)
        self.next_id += 1
        return job

    # -- events

    @rule(items=st.lists(st.tuples(digests, costs, st.integers(1, 60)), min_size=1, max_size=5))
    def submit(self, items: list[tuple[str, int, int]]) -> None:
        new = [self.new_job(*item) for item in items]
        assert self.ledger.room() == max(0, self.max_items - len(self.jobs))
        try:
            commands = self.ledger.submit(new, self.now)
        except EncoderError as error:
            assert error.code is ErrorCode.QUEUE_FULL
            assert len(self.jobs) + len(new) > self.max_items
            return
        assert len(self.jobs) + len(new) <= self.max_items
        self.jobs |= {job.job_id: Known(job) for job in new}
        fails = {job.job_id: ErrorCode.WORKER_DIED for job in new if self.is_refused(job.digest)}
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
        held, ghosts = self.held(replica), self.ghosts(replica)
        in_hand = held + ghosts
        named = data.draw(st.sets(st.sampled_from(in_hand))) | foreign if in_hand and known else foreign
        suspects = (named & set(in_hand)) if known else set(in_hand)
        self.ready.discard(replica)
        everything = self.jobs | self.withdrawn
        blamed = [everything[j] for j in suspects if everything[j].job.pinned is None]
        for digest in {known.job.digest for known in blamed}:
            self.proven.discard(digest)
            alone = any(known.alone for known in blamed if known.job.digest == digest)
            if alone and self.suspect.pop(digest, None):
                self.refused[digest] = self.now + QUARANTINE_S
            else:
                self.suspect[digest] = self.now + QUARANTINE_S
        for job_id in ghosts:
            del self.withdrawn[job_id]
        fails = {}
        for job_id in held:
            entry = self.jobs[job_id]
            if entry.job.pinned is not None:
                fails[job_id] = ErrorCode.WORKER_DIED
            entry.place = WAITING
            entry.alone = entry.alone or job_id in suspects
        fails |= {
            job_id: ErrorCode.WORKER_DIED for job_id in self.waiting() if self.is_refused(self.jobs[job_id].job.digest)
        }
        self.expect(self.ledger.replica_lost(replica, tuple(named) if known else None, self.now), fails=fails)

    @rule(data=st.data(), wrong=st.integers(0, 5), ok=st.booleans())
    def reply(self, data: st.DataObject, wrong: int, ok: bool) -> None:
        """A result or a failure; one time in some from a replica that does not have the job in hand."""
        replica = data.draw(st.sampled_from(self.replicas))
        held, ghosts = self.held(replica), self.ghosts(replica)
        in_hand = held + ghosts
        job_id = data.draw(st.sampled_from(in_hand)) if in_hand and wrong else data.draw(st.integers(0, self.next_id))
        code = data.draw(st.sampled_from([ErrorCode.MEDIA_CORRUPT, ErrorCode.CANCELLED]))
        error = EncoderError(code, "broken")
        mine = job_id in held
        if job_id in in_hand and (ok or code is ErrorCode.MEDIA_CORRUPT):
            self.answered((self.jobs | self.withdrawn)[job_id].job)
        commands = self.ledger.completed(replica, job_id) if ok else self.ledger.failed(replica, job_id, error)
        if job_id in ghosts:
            del self.withdrawn[job_id]  # nothing is resolved, but the room is free
            self.expect(commands)
        elif not mine:
            assert commands == []
        elif ok:
            self.expect(commands, delivers=[job_id])
        else:
            self.expect(commands, fails={job_id: code})

    @rule(data=st.data(), extra=st.lists(st.integers(0, 50), max_size=2, unique=True))
    def cancel(self, data: st.DataObject, extra: list[int]) -> None:
        mine = [job_id for job_id, known in self.jobs.items() if known.job.pinned is None]
        chosen = data.draw(st.sets(st.sampled_from(mine))) if mine else set()
        chosen |= {job_id for job_id in extra if job_id not in self.jobs}
        withdraws: dict[int, set[int]] = {}
        for job_id in chosen & self.jobs.keys():
            known = self.jobs.pop(job_id)
            if known.place is not WAITING:
                self.withdrawn[job_id] = known
                withdraws.setdefault(known.place, set()).add(job_id)
        self.expect(self.ledger.cancel(chosen), withdraws=withdraws)

    @rule(step=st.sampled_from([0.0, 1.0, 5.0, 25.0]))
    def tick(self, step: float) -> None:
        self.now += step
        for book in (self.suspect, self.refused):
            for digest in [digest for digest, until in book.items() if until <= self.now]:
                del book[digest]
        late = {job_id: known for job_id, known in self.jobs.items() if known.job.deadline <= self.now}
        withdraws: dict[int, set[int]] = {}
        for job_id, known in late.items():
            if known.place is not WAITING:
                self.withdrawn[job_id] = known
                withdraws.setdefault(known.place, set()).add(job_id)
        fails = dict.fromkeys(late, ErrorCode.DEADLINE_EXCEEDED)
        self.expect(self.ledger.tick(self.now), fails=fails, withdraws=withdraws)

    @rule(step=st.sampled_from([0.5, 21.0]))
    def time_passes_between_ticks(self, step: float) -> None:
        self.now += step

    @rule(data=st.data(), digest=digests, cost=costs)
    def probe(self, data: st.DataObject, digest: str, cost: int) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        job = self.new_job(digest, cost, 1000.0, replica)
        (send,) = self.ledger.probe(job)
        assert isinstance(send, Send)
        assert (send.replica, send.job_ids) == (replica, (job.job_id,))
        self.jobs[job.job_id] = Known(job, replica)

    @rule()
    @precondition(lambda self: self.next_id > 8)
    def fail_all(self) -> None:
        assume(self.jobs)
        withdraws = {replica: set(self.held(replica)) for replica in self.replicas if self.held(replica)}
        fails = dict.fromkeys(self.jobs, ErrorCode.DRAINING)
        self.withdrawn |= {j: known for j, known in self.jobs.items() if known.place is not WAITING}
        self.expect(self.ledger.fail_all(EncoderError(ErrorCode.DRAINING, "end")), fails=fails, withdraws=withdraws)
        assert self.ledger.num_jobs == 0

    # -- laws

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.num_jobs == len(self.jobs)
        for replica in self.replicas:
            load = self.ledger.load(replica)
            assert load.outstanding_items == self.in_hand(replica)
            assert load.outstanding_tokens == self.tokens(replica)

    @invariant()
    def nothing_waits_beside_a_free_replica(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for job_id in self.waiting():
            job = self.jobs[job_id].job
            free = {
                replica
                for replica in self.ready
                if (in_hand := self.in_hand(replica)) < self.window
                and (not in_hand or self.tokens(replica) + job.cost_tokens <= self.window_tokens)
            }
            assert not any(self.may_go(job.digest, replica) for replica in free), "it waits although there is room"
            if not free:
                break  # the younger must not overtake it

    def teardown(self) -> None:
        """With healthy replicas everything left comes to its end."""
        if not hasattr(self, "ledger"):
            return
        for replica in self.replicas:
            self.ready.add(replica)
            self.expect(self.ledger.replica_ready(replica))
        for job_id, known in list(self.withdrawn.items()):
            assert known.place is not None
            del self.withdrawn[job_id]
            self.expect(self.ledger.failed(known.place, job_id, EncoderError(ErrorCode.CANCELLED, "gone")))
        while self.jobs:
            job_id, known = next((j, k) for j, k in self.jobs.items() if k.place is not WAITING)
            assert known.place is not None
            self.answered(known.job)
            self.expect(self.ledger.completed(known.place, job_id), delivers=[job_id])
        assert self.ledger.num_jobs == 0
        assert all(self.ledger.load(r).outstanding_tokens == 0 for r in self.replicas)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
