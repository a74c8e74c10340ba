"""A model of the ledger that knows only which jobs share a work, and where each work is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, NewJob, Send, Withdraw
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.dispatcher.work import HIT_TOKENS
from spmd_encoder.errors import ErrorCode

QUARANTINE_S = 20.0
WAITING = None


@dataclass
class Known:
    """A work. One without jobs is a ghost: withdrawn, but its replica has not answered yet and may still be at it."""

    first: NewJob
    jobs: dict[int, float] = field(default_factory=dict)
    place: int | None = WAITING
    alone: bool = False
    charged: int = 0
    is_hit: bool = False
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


class LedgerModel:
    """The ledger's events, as they were told to it and to this; `expect` holds the ledger's commands against it."""

    def set_up(self, replicas: int, max_items: int, window: int, tokens: int, max_tokens: int, known: int) -> None:
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
        self.ghosts: set[int] = set()

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

    def hits(self, replica: int) -> int:
        return len(self.at(replica)) - len(self.encodes(replica))

    def is_refused(self, digest: str) -> bool:
        return self.refused.get(digest, self.now) > self.now

    def holders(self, digest: str) -> set[int | None]:
        return {w.place for w in self.works.values() if w.digest == digest and w.is_input} - {WAITING}

    def may_go(self, work: Known, replica: int) -> bool:
        if work.first.held:
            return replica in self.directory.holders(work.first.key)
        there = self.holders(work.digest)
        return not there or (there == {replica} and work.digest not in self.suspect)

    def is_held(self, work: Known) -> bool:
        return bool(self.directory.holders(work.first.key))

    def encodes(self, replica: int) -> list[Known]:
        return [work for work in self.at(replica).values() if not work.is_hit]

    def unheld(self) -> list[int]:
        """Jobs without bytes whose result nobody holds any more."""
        works = [w for w in self.works.values() if w.first.held and w.place is WAITING]
        return [job_id for w in works if not self.directory.holders(w.first.key) for job_id in w.jobs]

    def has_room(self, work: Known, replica: int) -> bool:
        """For an encode; a hit needs none."""
        in_hand = self.encodes(replica)
        tokens = sum(other.charged for other in in_hand) + work.first.cost_tokens
        return replica in self.ready and len(in_hand) < self.window and (not in_hand or tokens <= self.window_tokens)

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
                work.is_hit = self.is_held(work)
                assert not work.is_hit or send.replica in self.directory.holders(work.first.key)
                work.charged = HIT_TOKENS if work.is_hit else work.first.cost_tokens
                work.place, work.alone, work.told = send.replica, alone, deadline
            if all(self.works[work_id].is_hit for work_id in send.work_ids):
                continue
            in_hand = self.encodes(send.replica)
            assert len(in_hand) <= self.window
            assert self.hits(send.replica) <= 4 * self.window
            assert len(in_hand) == 1 or sum(work.charged for work in in_hand) <= self.window_tokens
        sent = [work_id for send in sends for work_id in send.work_ids if not self.works[work_id].is_hit]
        for work_id in self.waiting():
            work = self.works[work_id]
            held_back = self.is_held(work) or self.holders(work.digest)
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
