"""One replica's life as the dispatcher sees it: a pure state machine, the authority over its epoch.

    STARTING -> READY -> LOST -> HEALING -> READY       HEALING -> FAILED (goes on trying)
    READY -> DRAINING -> GONE

The replica is the unit of failure: whatever befalls one of its workers, all of them are ended and started anew
under the next epoch. LOST lasts until the leader's keeper has said what its worker was doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

START_TRIES = 5
FIRST_PAUSE_S = 0.5
FAILED_PAUSE_S = 30.0


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    HEALING = "healing"
    FAILED = "failed"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True)
class ReformReplica:
    """Send `Reform` to the keepers of all its ranks."""

    epoch: int
    pause_s: float


@dataclass(frozen=True)
class SettleJobs:
    """Tell the ledger that the replica's workers are gone. `suspects` None: nobody knows."""

    suspects: tuple[int, ...] | None


@dataclass(frozen=True)
class SendProbe:
    """Encode a probe on it before it counts as ready."""


@dataclass(frozen=True)
class TakeWork:
    """It is ready."""


@dataclass(frozen=True)
class EndWorld:
    """It cannot come up: end every rank with exit code 1 and this reason."""

    reason: str


Effect = ReformReplica | SettleJobs | SendProbe | TakeWork | EndWorld


@dataclass
class Replica:
    index: int
    leader_rank: int
    state: ReplicaState = ReplicaState.STARTING
    epoch: int = 0
    was_ready: bool = False
    failures: int = 0
    """Epochs in a row that ended before they were ready."""
    said_hello: bool = False
    last_reason: str = ""
    _draining: bool = False
    _unreported: int | None = None
    """In LOST: the epoch whose end the leader's keeper has not reported yet."""
    _missing_keepers: set[int] = field(default_factory=set)

    @property
    def shown_state(self) -> ReplicaState:
        draining = self._draining and self.state is ReplicaState.READY
        return ReplicaState.DRAINING if draining else self.state

    # -- events

    def hello(self, epoch: int) -> list[Effect]:
        if epoch != self.epoch or self._is_out() or self.said_hello:
            return []
        self.said_hello = True
        # A new worker says hello: the old one is gone, although nobody has said yet what it was doing.
        return [*self.no_report(), SendProbe()]

    def probe_done(self, epoch: int, error: str | None) -> list[Effect]:
        """The outcome of a probe that was sent in `epoch`."""
        if epoch != self.epoch or self._is_out() or not self.said_hello:
            return []
        if error is not None:
            return self.stalled(epoch, f"a probe failed: {error}")
        if self.state is ReplicaState.READY:
            return []
        self.state = ReplicaState.READY
        self.was_ready = True
        self.failures = 0
        return [TakeWork()]

    def worker_exited(
        self, rank: int, epoch: int, *, suspects: Iterable[int], fatal: bool, reason: str
    ) -> list[Effect]:
        """A keeper's report; only the leader's knows the suspects."""
        leader = rank == self.leader_rank
        if self.state is ReplicaState.LOST and leader and epoch == self._unreported:
            self.state = self._ended_state()
            self._unreported = None
            return [SettleJobs(tuple(suspects))]
        if self._is_out() or epoch != self.epoch:
            return []
        self.last_reason = reason
        return self._lose(tuple(suspects) if leader else None, fatal=fatal)

    def keeper_lost(self, rank: int) -> list[Effect]:
        """The rank's keeper does not answer; the launcher brings it back, or it connects again."""
        self._missing_keepers.add(rank)
        if self.state is ReplicaState.GONE:
            return [SettleJobs(None)]
        self.last_reason = f"the keeper of rank {rank} is gone"
        self.state = ReplicaState.FAILED
        self._unreported = None
        return [SettleJobs(None)]

    def keeper_back(self, rank: int) -> list[Effect]:
        """A keeper says hello. All ranks of a replica that lost one are formed anew."""
        if rank not in self._missing_keepers:
            return []
        self._missing_keepers.discard(rank)
        return [] if self._is_out() else self._lose((), fatal=False)

    def stalled(self, epoch: int, reason: str) -> list[Effect]:
        """A rank shows no progress."""
        if epoch != self.epoch or self._is_out() or self.state is ReplicaState.LOST:
            return []
        self.last_reason = reason
        return self._lose(None, fatal=False)

    def no_report(self) -> list[Effect]:
        """The leader's keeper has not said in time what its worker was doing."""
        if self.state is not ReplicaState.LOST:
            return []
        self.state = self._ended_state()
        self._unreported = None
        return [SettleJobs(None)]

    def drain(self) -> None:
        """Only shown: a replica that is lost while draining still heals, for the sake of what it had in hand."""
        self._draining = True

    def gone(self) -> None:
        """Its workers are being ended on purpose."""
        self.state = ReplicaState.GONE

    # -- parts

    def _is_out(self) -> bool:
        """Being ended, or not to be formed before all its keepers are back."""
        return self.state is ReplicaState.GONE or bool(self._missing_keepers)

    def _ended_state(self) -> ReplicaState:
        return ReplicaState.FAILED if self.failures >= START_TRIES else ReplicaState.HEALING

    def _lose(self, suspects: tuple[int, ...] | None, *, fatal: bool) -> list[Effect]:
        """`suspects` None: the leader has not reported yet."""
        if self._missing_keepers:
            return []
        if self.state not in (ReplicaState.READY, ReplicaState.LOST):
            self.failures += 1
        if not self.was_ready and (fatal or self.failures >= START_TRIES):
            self.state = ReplicaState.FAILED
            tries = "" if fatal else f" (tried {self.failures} times)"
            return [SettleJobs(None), EndWorld(f"replica {self.index} does not come up{tries}: {self.last_reason}")]
        had_work, ended = self.said_hello, self.epoch
        self.epoch += 1
        self.said_hello = False
        reform = ReformReplica(self.epoch, self._pause())
        if self.state is ReplicaState.LOST:
            return [reform]
        if suspects is None and had_work:
            self.state, self._unreported = ReplicaState.LOST, ended
            return [reform]
        self.state = ReplicaState.FAILED if fatal else self._ended_state()
        return [reform, SettleJobs(suspects or ())]

    def _pause(self) -> float:
        if self.failures == 0:
            return 0.0
        if self.failures >= START_TRIES:
            return FAILED_PAUSE_S
        return float(FIRST_PAUSE_S * 2 ** (self.failures - 1))
