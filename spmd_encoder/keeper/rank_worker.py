"""A keeper's care for its one worker: start it, watch it, end it, start the next epoch's."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.starter import Child, Starter
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.messages import (
    Beat,
    FromKeeper,
    FromWorker,
    Joined,
    Progress,
    Reform,
    StopWorker,
    StoreReady,
    WorkerExited,
    WorkerFailing,
    WorkerSpec,
    WorkerStarted,
    WorldRecord,
)
from spmd_encoder.wire.streams import Stream, over_socket
from spmd_encoder.wire.tower_page import TowerPage

log = logging.getLogger(__name__)

START_TRIES = 5
FIRST_PAUSE_S = 0.5
START_PAUSE_S = 1.0
STOP_TIMEOUT_S = 3.0


def ending(code: int) -> str:
    """An exit code in words: negative ones are signals."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


@dataclass
class _Watched:
    """What is known of the worker that runs now."""

    child: Child
    stream: Stream[FromWorker]
    epoch: int
    beat_at: float = field(default_factory=time.monotonic)
    last_order: int = -1
    busy_s: float = 0.0
    failing: WorkerFailing | None = None
    preloaded: bool | None = None
    preparers: tuple[int, ...] = ()


class RankWorker:
    """`tower` says what is in the worker's tower. `make_spec(epoch, attempt, world)` describes the next worker;
    `on_joined` is told the world once; `report` sends to the dispatcher (what is said before there is one is said again
    by `hello`)."""

    def __init__(
        self,
        rank: int,
        coordinates: tuple[int, int],
        starter: Starter,
        tower: TowerPage,
        make_spec: Callable[[int, int, WorldRecord | None], WorkerSpec],
        *,
        load_timeout_s: float,
        on_joined: Callable[[WorldRecord], None],
        report: Callable[[FromKeeper], None],
    ) -> None:
        self._rank = rank
        self._coordinates = coordinates
        self._starter = starter
        self._tower = tower
        self._make_spec = make_spec
        self._load_timeout_s = load_timeout_s
        self._on_joined = on_joined
        self._report = report
        self._world: WorldRecord | None = None
        self._now: _Watched | None = None
        self._target = 0
        self._pause_s = 0.0
        self._reformed = asyncio.Event()
        self._stopping = False
        self._last_exit: WorkerExited | None = None

    # -- the worker's life

    async def run(self) -> None:
        """Until stopped. Raises StartupError where the worker cannot come up before the world has agreed."""
        attempt = 0
        while not self._stopping:
            exited = await self._live_once(attempt)
            if self._stopping:
                return
            if self._world is None:
                attempt += 1
                if exited.fatal:
                    code = self._now.failing.exit_code if self._now and self._now.failing else 1
                    raise StartupError(exited.reason, exit_code=code)
                if attempt >= START_TRIES:
                    said = "; its last lines: " + " | ".join(exited.last_lines) if exited.last_lines else ""
                    raise StartupError(
                        f"the worker did not come up in {attempt} tries; the last: {ending(exited.code)}{said}"
                    )
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
                continue
            self._last_exit = exited
            self._report(exited)
            await self._next_epoch(exited.epoch)

    async def _live_once(self, attempt: int) -> WorkerExited:
        epoch = self._target
        try:
            self._tower = self._tower.for_next_writer()
        except OSError as error:
            log.error("the page of what is in the tower has gone and cannot be made anew: %s", error)
        child = await self._start(epoch, attempt)
        self._now = now = _Watched(child, await over_socket(child.sock, FromWorker), epoch)
        self._report(self._started(now))
        if self._stopping or epoch != self._target:
            child.kill()
        watch = asyncio.create_task(self._watch_start(now))
        try:
            await self._listen(now)
        finally:
            watch.cancel()
        code = await child.wait()
        await child.output.finished()
        child.output.close()
        now.stream.close()
        reason = now.failing.reason if now.failing else ""
        if not self._stopping:
            log.warning("the worker of epoch %d (pid %d) ended with code %d %s", epoch, child.pid, code, reason)
        return WorkerExited(
            rank=self._rank,
            epoch=epoch,
            code=code,
            suspects=() if child.fell_with_nursery else self._tower.read(),
            fatal=bool(now.failing and now.failing.fatal),
            reason=reason,
            last_lines=tuple(child.output.last_lines),
        )

    async def _start(self, epoch: int, attempt: int) -> Child:
        while True:
            try:
                return await self._starter.start(self._make_spec(epoch, attempt, self._world))
            except OSError as error:
                log.error("the worker could not be started, trying again: %s", error)
                await asyncio.sleep(START_PAUSE_S)

    async def _watch_start(self, now: _Watched) -> None:
        """Until there is a dispatcher, who judges workers: end one that gives no sign of life (it may be stopped)."""
        while self._world is None:
            await asyncio.sleep(START_PAUSE_S)
            if time.monotonic() - now.beat_at > self._load_timeout_s:
                log.error("the worker gave no sign of life for %.0f s; ending it", self._load_timeout_s)
                now.child.kill()
                return

    async def _listen(self, now: _Watched) -> None:
        while True:
            try:
                message = await now.stream.receive()
            except WireError as error:
                log.error("the worker said something that is no message: %s", error)
                now.child.kill()
                return
            match message:
                case None:
                    return
                case Beat():
                    now.beat_at = time.monotonic()
                    now.last_order, now.busy_s = message.last_order, message.busy_s
                    if (now.preloaded, now.preparers) != (message.preloaded, message.preparers):
                        now.preloaded, now.preparers = message.preloaded, message.preparers
                        self._report(self._started(now))
                case Joined():
                    if self._world is None:
                        self._world = message.world
                        self._on_joined(message.world)
                case WorkerFailing():
                    now.failing = message
                case StoreReady():
                    pass
                case _:
                    assert_never(message)

    async def _next_epoch(self, ended: int) -> None:
        while self._target <= ended and not self._stopping:
            self._reformed.clear()
            await self._reformed.wait()
        if self._pause_s and not self._stopping:
            self._reformed.clear()
            try:
                await asyncio.wait_for(self._reformed.wait(), self._pause_s)
            except TimeoutError:
                return

    # -- what the dispatcher wants

    def reform(self, message: Reform) -> None:
        if message.epoch <= self._target:
            return
        self._target, self._pause_s = message.epoch, message.pause_s
        if self._now is not None and self._now.epoch < message.epoch:
            self._now.child.kill()
        self._reformed.set()

    def slept(self, gap_s: float) -> None:
        """This process stood still for so long: the worker may have spoken, and was not heard."""
        if self._now is not None:
            self._now.beat_at += gap_s

    def progress(self) -> Progress | None:
        """What the dispatcher hears once a second."""
        now = self._now
        if now is None:
            return None
        age_s = time.monotonic() - now.beat_at
        return Progress(
            rank=self._rank, epoch=now.epoch, last_order=now.last_order, beat_age_s=age_s, busy_s=now.busy_s
        )

    def state(self) -> list[FromKeeper]:
        """Said after every (re)connection to the dispatcher: the worker that runs, or the end of the last one."""
        said: list[FromKeeper] = []
        if self._now is not None:
            said.append(self._started(self._now))
        if self._last_exit is not None and self._last_exit.epoch >= self._target:
            said.append(self._last_exit)
        return said

    async def stop(self) -> None:
        """Let the worker end by itself, or end it."""
        self._stopping = True
        self._reformed.set()
        if self._now is None:
            return
        self._now.stream.send(StopWorker())
        try:
            await asyncio.wait_for(self._now.child.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("the worker did not end within %.0f s", STOP_TIMEOUT_S)
        self._now.child.kill()

    def kill(self) -> None:
        self._stopping = True
        if self._now is not None:
            self._now.child.kill()

    def _started(self, now: _Watched) -> WorkerStarted:
        return WorkerStarted(
            rank=self._rank,
            epoch=now.epoch,
            process=self._process(now, "worker", now.child.pid),
            preparers=tuple(self._process(now, "preparer", pid) for pid in now.preparers),
        )

    def _process(self, now: _Watched, role: str, pid: int) -> ProcessInfo:
        dp_rank, tp_rank = self._coordinates
        return ProcessInfo(
            rank=self._rank,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
            role=role,
            pid=pid,
            epoch=now.epoch,
            preloaded=now.preloaded,
        )
