"""Which ranks show no progress: pure arithmetic on what keepers and leaders report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Seconds. `beat_s`: a worker's loop without a sign; `start_beat_s`: the same before its first hello;
    `load_s`: start to hello; `batch_s`: one order on the compute thread; `keeper_s`: a keeper that says nothing."""

    beat_s: float
    start_beat_s: float
    load_s: float
    batch_s: float
    keeper_s: float


@dataclass
class _Rank:
    told_at: float
    epoch: int = -1
    beat_age_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class Liveness:
    limits: Limits
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _since: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Per replica: (epoch, when it began)."""
    _heard: dict[int, float] = field(default_factory=dict)
    """Per replica: the last heartbeat of its leader in this epoch."""

    def epoch_began(self, replica: int, epoch: int, now: float) -> None:
        self._since[replica] = (epoch, now)
        self._heard.pop(replica, None)

    def progress(self, rank: int, epoch: int, now: float, *, beat_age_s: float, busy_s: float) -> None:
        self._ranks[rank] = _Rank(now, epoch, beat_age_s, busy_s)

    def keeper_lost(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def slept(self, gap_s: float) -> None:
        """We ourselves stood still for so long: nobody else is to blame for it."""
        self._since = {replica: (epoch, since + gap_s) for replica, (epoch, since) in self._since.items()}
        self._heard = {replica: heard + gap_s for replica, heard in self._heard.items()}
        for seen in self._ranks.values():
            seen.told_at += gap_s

    def silent_keepers(self, now: float) -> list[int]:
        """Ranks whose keeper, once heard, has said nothing for too long (a stopped process keeps its connection)."""
        return [rank for rank, seen in self._ranks.items() if now - seen.told_at > self.limits.keeper_s]

    def heartbeat(self, replica: int, now: float) -> None:
        self._heard[replica] = now

    def complaint(self, replica: int, ranks: range, *, said_hello: bool, now: float) -> str | None:
        """Why the replica must be formed anew, or None."""
        epoch, since = self._since.get(replica, (0, now))
        if not said_hello and now - since > self.limits.load_s:
            return f"did not come up within {self.limits.load_s:.0f} s"
        limit = self.limits.beat_s if said_hello else self.limits.start_beat_s
        for rank in ranks:
            seen = self._ranks.get(rank)
            if seen is None or seen.epoch != epoch:
                continue
            if seen.beat_age_s > limit:
                return f"the worker of rank {rank} gave no sign of life for {seen.beat_age_s:.1f} s"
            if said_hello and seen.busy_s > self.limits.batch_s:
                return f"a batch on rank {rank} has been running for {seen.busy_s:.0f} s"
        heard = self._heard.get(replica)
        if said_hello and heard is not None and now - heard > 3 * self.limits.beat_s:
            return f"the scheduler sent no heartbeat for {now - heard:.1f} s"
        return None
