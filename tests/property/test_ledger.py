"""The ledger against a model that knows only which jobs share a work, and where each work is."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spmd_encoder.api.types import HeldResult, OutputKind
from spmd_encoder.dispatcher.commands import Key, Send
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.examples import examples
from tests.harness.ledger_model import QUARANTINE_S, WAITING, Known, LedgerModel

KEPT = HeldResult(kind=OutputKind.TOKENS, shape=(1, 2), dtype="float32", num_tokens=1, grid=None)
digests = st.sampled_from("abc")
outputs = st.sampled_from(["tokens", "pooled"])
costs = st.integers(1, 14)
some_held = st.sampled_from([False, False, False, True])


class LedgerMachine(LedgerModel, RuleBasedStateMachine):
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
        self.set_up(replicas, max_items, window, tokens, max_tokens, known)
        for replica in self.replicas if ready else ():
            self.ready.add(replica)
            self.expect(self.ledger.replica_ready(replica))

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
            if alone and self.suspect.pop(digest, 0.0):
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
        for work in self.at(replica).values():
            if work.is_hit and not work.first.held and work.first.key == (digest, output):
                work.is_hit, work.charged = False, work.first.cost_tokens
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
            may = [replica for replica in self.ready if self.may_go(work, replica)]
            if holders := self.directory.holders(work.first.key):
                there = {replica for replica in holders if self.hits(replica) < 4 * self.window}
                assert not there & set(may), "what a cache holds waits for no room among encodes"
                continue
            free = {replica for replica in self.replicas if self.has_room(work, replica)}
            if not free:
                break  # the younger must not overtake it
            if both := free & set(may):
                least = min(self.tokens(replica) for replica in both)
                sooner = [r for r in may if r not in free and self.tokens(r) + work.first.cost_tokens <= least]
                assert sooner, "it waits although there is room"
                break

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
TestLedger.settings = examples(300, stateful_step_count=50)
