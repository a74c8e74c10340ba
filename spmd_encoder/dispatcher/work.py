"""A work is what a replica is asked to do once, for all jobs that want it; hands are what one replica is at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spmd_encoder.dispatcher.commands import Key, NewJob
from spmd_encoder.dispatcher.routing import Load

HIT_TOKENS = 1
"""What a work costs where its result is held already."""


@dataclass(eq=False)
class Work:
    """`work_id` is its first job's. Without jobs it is wanted no more, but a replica may still be at it."""

    work_id: int
    key: Key
    cost_tokens: int
    pinned: int | None = None
    held: bool = False
    jobs: dict[int, NewJob] = field(default_factory=dict)
    replica: int | None = None
    alone: bool = False
    charged_tokens: int = 0
    is_hit: bool = False
    """Whether its replica, as far as is known, answers out of its cache."""
    deadline: float = 0.0
    """What the replica was told, which jobs that came later do not know."""

    @classmethod
    def of(cls, job: NewJob) -> Work:
        return cls(job.job_id, job.key, job.cost_tokens, job.pinned, job.held, {job.job_id: job})

    @property
    def digest(self) -> str:
        return self.key[0]

    @property
    def is_input(self) -> bool:
        """A caller's bytes go through a worker, which they may kill."""
        return self.pinned is None and not self.held


@dataclass
class Hands:
    """What one replica has in hand. A withdrawn work stays, charged and to blame, until the replica has answered or is
    lost: it may still be running."""

    ready: bool = False
    works: dict[int, Work] = field(default_factory=dict)
    tokens: int = 0
    hits: int = 0
    digests: Counter[str] = field(default_factory=Counter)
    """Of all inputs."""

    @property
    def load(self) -> Load:
        return Load(self.tokens, len(self.works))

    @property
    def encodes(self) -> int:
        return len(self.works) - self.hits

    @property
    def encode_tokens(self) -> int:
        return self.tokens - HIT_TOKENS * self.hits

    def take(self, work: Work, *, is_hit: bool = False) -> None:
        work.is_hit = is_hit
        work.charged_tokens = HIT_TOKENS if is_hit else work.cost_tokens
        self.hits += is_hit
        work.deadline = max(job.deadline for job in work.jobs.values())
        self.works[work.work_id] = work
        self.tokens += work.charged_tokens
        self.digests[work.digest] += work.is_input

    def settle(self, work_id: int) -> Work | None:
        """Take the work off these hands; None where it is not in them (late, or a lie)."""
        if (work := self.works.pop(work_id, None)) is not None:
            self.tokens -= work.charged_tokens
            self.hits -= work.is_hit
            self.digests[work.digest] -= work.is_input
            if not self.digests[work.digest]:
                del self.digests[work.digest]
        return work

    def no_hits(self, keys: frozenset[Key]) -> None:
        """Works of these keys are no hits; those without bytes will fail, and cost nothing."""
        for work in self.works.values():
            if work.is_hit and not work.held and work.key in keys:
                work.is_hit = False
                self.hits -= 1
                self.tokens += work.cost_tokens - work.charged_tokens
                work.charged_tokens = work.cost_tokens

    def drop_all(self) -> list[Work]:
        """What was in them, oldest first."""
        works = sorted(self.works.values(), key=lambda work: work.work_id)
        self.works.clear()
        self.digests.clear()
        self.tokens = self.hits = 0
        return works
