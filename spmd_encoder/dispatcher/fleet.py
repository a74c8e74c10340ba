"""The fleet: every replica's machine, its keepers' connections and its scheduler's socket, behind one name each."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.dispatcher.control import ControlServer
from spmd_encoder.dispatcher.liveness import Liveness
from spmd_encoder.dispatcher.replica import Effect, Replica, ReplicaState
from spmd_encoder.dispatcher.routing import Load
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.observability.logging import SparseLog
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.messages import (
    PROTOCOL_VERSION,
    FromKeeper,
    FromScheduler,
    Heartbeat,
    Hello,
    KeeperHello,
    NurseryStarted,
    Progress,
    Reform,
    Stop,
    ToScheduler,
    WorkerExited,
    WorkerStarted,
)
from spmd_encoder.wire.sockets import Frames, RouterSocket

log = logging.getLogger(__name__)
REPORT_TIMEOUT_S = 3.0


class Fleet:
    def __init__(
        self,
        layout: Layout,
        *,
        control: ControlServer,
        work: RouterSocket[FromScheduler],
        liveness: Liveness,
        config_digest: str,
    ) -> None:
        self._layout = layout
        self._control = control
        self._work = work
        self._liveness = liveness
        self._config_digest = config_digest
        self._replicas = [Replica(index, layout.leader_of(index)) for index in layout.replicas]
        self._peers: dict[int, bytes] = {}
        self._by_peer: dict[bytes, int] = {}
        self._last_sign: dict[int, float] = {}
        self._lost_at: dict[int, float] = {}
        self._processes: dict[tuple[int, str], ProcessInfo] = {}
        self._preparers: dict[int, tuple[ProcessInfo, ...]] = {}
        self._hellos: dict[int, Hello] = {}
        self._hello_at: dict[int, float] = {}  # until the first probe is back
        self._probe_s: dict[int, float] = {}
        self.versions: dict[str, str] = {}
        self._strangers = SparseLog(log)
        now = time.monotonic()
        for replica in layout.replicas:
            liveness.epoch_began(replica, 0, now)

    # -- work sockets

    async def receive(self) -> tuple[int, FromScheduler, Sequence[memoryview]] | None:
        """The next message of a scheduler of this world and epoch; None for anything else that came."""
        try:
            peer, message, frames = await self._work.receive()
        except WireError as error:
            self._strangers.warning("dropped a frame on the work socket: %s", error)
            return None
        if isinstance(message, Hello):
            return (message.replica, message, frames) if self._admits(peer, message) else None
        replica = self._by_peer.get(peer)
        if replica is None:
            return None
        if not isinstance(message, Heartbeat):
            self._last_sign[replica] = time.monotonic()
        return replica, message, frames

    def _admits(self, peer: bytes, hello: Hello) -> bool:
        if hello.protocol != PROTOCOL_VERSION or hello.config_digest != self._config_digest:
            self._strangers.warning("refused a scheduler that does not belong to this world")
            return False
        if hello.replica not in self._layout.replicas or hello.epoch != self._replicas[hello.replica].epoch:
            return False
        self._by_peer.pop(self._peers.get(hello.replica, b""), None)
        self._peers[hello.replica] = peer
        self._by_peer[peer] = hello.replica
        return True

    def send(self, replica: int, message: ToScheduler, frames: Frames = ()) -> None:
        """To the replica's scheduler of this epoch; what is sent to none is settled by the replica's loss."""
        if (peer := self._peers.get(replica)) is not None:
            self._work.send(peer, message, frames)

    # -- events of the replica machines

    def hello(self, replica: int, hello: Hello) -> list[Effect]:
        self._hellos[replica] = hello
        self._hello_at[replica] = time.monotonic()
        self._liveness.heartbeat(replica, time.monotonic())
        return self._replicas[replica].hello(hello.epoch)

    def heard(self, replica: int) -> None:
        self._liveness.heartbeat(replica, time.monotonic())

    def probed(self, replica: int) -> None:
        self._last_sign[replica] = time.monotonic()

    def probe_done(self, replica: int, epoch: int, error: EncoderError | None) -> list[Effect]:
        if error is not None and self._is_settled(error.code, replica):
            return []
        if (since := self._hello_at.pop(replica, None)) is not None:
            self._probe_s[replica] = round(time.monotonic() - since, 3)
        return self._replicas[replica].probe_done(epoch, error.message if error else None)

    def _is_settled(self, code: ErrorCode, replica: int) -> bool:
        """Whether nothing more has to be done about a probe that failed with `code`: a dead worker's replica is formed
        anew anyway, and where a decoder had no processor it was replaced."""
        return code is ErrorCode.WORKER_DIED or (code is ErrorCode.OVERLOADED and self.is_ready(replica))

    def keeper_said(self, message: FromKeeper) -> Iterator[tuple[int, list[Effect]]]:
        replica = self._layout.coordinates(message.rank)[0] if not isinstance(message, NurseryStarted) else -1
        match message:
            case KeeperHello():
                self._remember(message.process)
                if message.nursery is not None:
                    self._remember(message.nursery)
                self.versions.update(message.versions)
                effects = self._replicas[replica].keeper_back(message.rank)
                if not effects and self._replicas[replica].epoch > 0:
                    # Its replica was formed anew before this keeper was here to be told.
                    self._control.send(message.rank, Reform(replica=replica, epoch=self._replicas[replica].epoch))
                yield replica, effects
            case NurseryStarted():
                self._remember(message.process)
            case WorkerStarted():
                self._remember(message.process)
                self._preparers[message.rank] = message.preparers
            case WorkerExited():
                self._processes.pop((message.rank, "worker"), None)
                self._preparers.pop(message.rank, None)
                yield replica, self._worker_exited(replica, message)
            case Progress():
                self._liveness.progress(
                    message.rank,
                    message.epoch,
                    time.monotonic(),
                    beat_age_s=message.beat_age_s,
                    busy_s=message.busy_s,
                )
            case _:
                assert_never(message)

    def _worker_exited(self, replica: int, message: WorkerExited) -> list[Effect]:
        reason = message.reason or f"the worker of rank {message.rank} ended with code {message.code}"
        if message.last_lines and not self._replicas[replica].was_ready:
            reason += "; its last lines: " + " | ".join(message.last_lines)
        return self._replicas[replica].worker_exited(
            message.rank, message.epoch, suspects=message.suspects, fatal=message.fatal, reason=reason
        )

    def keeper_lost(self, rank: int) -> tuple[int, list[Effect]]:
        replica, _ = self._layout.coordinates(rank)
        self._liveness.keeper_lost(rank)
        for key in [key for key in self._processes if key[0] == rank]:
            del self._processes[key]
        self._preparers.pop(rank, None)
        return replica, self._replicas[replica].keeper_lost(rank)

    def reform(self, replica: int, message: Reform) -> None:
        if (peer := self._peers.pop(replica, None)) is not None:
            self._by_peer.pop(peer, None)
        now = time.monotonic()
        self._lost_at[replica] = now
        self._liveness.epoch_began(replica, message.epoch, now + message.pause_s)
        for rank in self._layout.ranks_of(replica):
            self._control.send(rank, message)

    def slept(self, gap_s: float) -> None:
        """This process stood still for so long (stopped, or starved)."""
        self._liveness.slept(gap_s)
        self._last_sign = {replica: sign + gap_s for replica, sign in self._last_sign.items()}
        self._lost_at = {replica: lost + gap_s for replica, lost in self._lost_at.items()}

    def check(self, now: float) -> Iterator[tuple[int, list[Effect]]]:
        """Replicas that show no progress, reports that did not come, keepers that say nothing."""
        for rank in self._liveness.silent_keepers(now):
            log.error("the keeper of rank %d says nothing any more; hanging up", rank)
            self._liveness.keeper_lost(rank)
            self._control.drop(rank)
        for replica in self._replicas:
            ranks = self._layout.ranks_of(replica.index)
            complaint = self._liveness.complaint(replica.index, ranks, said_hello=replica.said_hello, now=now)
            if complaint is not None:
                yield replica.index, replica.stalled(replica.epoch, complaint)
            if replica.state is ReplicaState.LOST and now - self._lost_at[replica.index] > REPORT_TIMEOUT_S:
                yield replica.index, replica.no_report()

    # -- questions

    def count(self, state: ReplicaState) -> int:
        return sum(replica.state is state for replica in self._replicas)

    def is_ready(self, replica: int) -> bool:
        return self._replicas[replica].state is ReplicaState.READY

    def state_counts(self) -> Counter[str]:
        return Counter(str(replica.shown_state) for replica in self._replicas)

    def all_failed(self) -> bool:
        return all(replica.state is ReplicaState.FAILED for replica in self._replicas)

    def all_were_ready(self) -> bool:
        return all(replica.was_ready for replica in self._replicas)

    def epoch(self, replica: int) -> int:
        return self._replicas[replica].epoch

    def reason(self, replica: int) -> str:
        return self._replicas[replica].last_reason

    def start_s(self, replica: int) -> dict[str, float]:
        """Seconds of each phase of the replica's last start, up to its first probe; empty before its first hello."""
        hello = self._hellos.get(replica)
        if hello is None:
            return {}
        probe = {} if replica in self._hello_at else {"probe": self._probe_s[replica]}
        return {**hello.start_s, **probe}

    def idle_too_long(self, now: float, limit_s: float) -> list[int]:
        """Ready replicas that have said nothing but heartbeats for `limit_s`."""
        return [
            replica.index
            for replica in self._replicas
            if replica.state is ReplicaState.READY and now - self._last_sign.get(replica.index, now) > limit_s
        ]

    def processes(self) -> list[ProcessInfo]:
        preparers = [process for rank in sorted(self._preparers) for process in self._preparers[rank]]
        return [self._processes[key] for key in sorted(self._processes)] + preparers

    def describe(self, load: Callable[[int], Load]) -> list[dict[str, Any]]:
        return [
            {
                "replica": replica.index,
                "ranks": list(self._layout.ranks_of(replica.index)),
                "state": str(replica.shown_state),
                "epoch": replica.epoch,
                "outstanding_items": load(replica.index).outstanding_items,
                "outstanding_tokens": load(replica.index).outstanding_tokens,
                "load_s": hello.load_s if (hello := self._hellos.get(replica.index)) else None,
                "start_s": self.start_s(replica.index),
                "tower_bytes": hello.tower_bytes if hello else None,
                "last_reason": replica.last_reason or None,
            }
            for replica in self._replicas
        ]

    # -- the end

    def drain(self) -> None:
        for replica in self._replicas:
            replica.drain()

    def stop_all(self, stop: Stop) -> None:
        for replica in self._replicas:
            replica.gone()
        self._control.closing = True
        self._control.broadcast(stop)

    async def flush(self) -> None:
        await self._control.flush()

    def close(self) -> None:
        self._control.close()
        self._work.close()

    def _remember(self, process: ProcessInfo) -> None:
        self._processes[(process.rank, process.role)] = process
