"""The keeper: the process that torchrun started. Owns what must outlive a crash; never imports torch."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Coroutine
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.config import Config
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.control_client import ControlClient, DispatcherLostError
from spmd_encoder.keeper.front import FrontHost, bind_ports
from spmd_encoder.keeper.nursery_watch import NurseryWatch
from spmd_encoder.keeper.rank_worker import RankWorker
from spmd_encoder.keeper.run_dir import RunDir
from spmd_encoder.keeper.signals import Signals
from spmd_encoder.keeper.starter import child_starter, forks
from spmd_encoder.keeper.store import StoreHost
from spmd_encoder.launch_env import LaunchEnv
from spmd_encoder.wire.messages import Endpoint, NurseryStarted, Stop, WorkerSpec, WorldRecord
from spmd_encoder.wire.tower_page import TowerPage, tower_page_path

log = logging.getLogger(__name__)

EXIT_PORT = 3
EXIT_WORLD_LOST = 4
EXIT_DRAIN_CUT = 5
LAST_GRACE_S = 3.0


class Keeper:
    """`launcher`: the pid that was this process's parent when it began."""

    def __init__(
        self, config: Config, env: LaunchEnv, layout: Layout, run_dir: RunDir, host: str, launcher: int
    ) -> None:
        self._config = config
        self._env = env
        self._layout = layout
        self._run_dir = run_dir
        self._host = host
        self._launcher = launcher
        self._id = uuid.uuid4().hex
        self._forks = forks(config.lifecycle)
        self._front: FrontHost | None = None
        self._nursery: NurseryWatch | None = None
        self._store = StoreHost(env)
        self._world: asyncio.Future[WorldRecord] = asyncio.get_running_loop().create_future()
        self._worker = RankWorker(
            env.rank,
            layout.coordinates(env.rank),
            child_starter(run_dir.path, config.lifecycle),
            _tower_page(run_dir.path, env.rank, config.limits.max_batch_items),
            self._spec,
            load_timeout_s=config.lifecycle.load_timeout_s,
            on_joined=self._on_joined,
            report=lambda message: self._control.report(message),
        )
        self._control = ControlClient(
            self._process(),
            self._worker,
            nursery=lambda: self._nursery.info if self._nursery else None,
            versions=_versions(),
        )
        self._front_opened = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> int:
        """The rank's exit code. Raises StartupError where it never came up."""
        signals = Signals()
        if self._env.under_torchrun:
            self._tasks.append(signals.follow_launcher(self._launcher))
        try:
            stop = await self._serve(signals, self._bind_ports())
        except StartupError as error:
            # Elsewhere the launcher ends the other ranks; the dispatcher may know some of them already.
            if self._front is not None:
                await self._front.dispatcher.stop_world(Stop(exit_code=1, reason=error.message))
            raise
        finally:
            await self._close(forced=signals.end.is_set())
            signals.close()
        if stop.reason:
            raise StartupError(stop.reason, exit_code=stop.exit_code)
        return stop.exit_code

    # -- the parts of a life

    def _bind_ports(self) -> dict[str, socket.socket] | None:
        """The front ends' ports, where this rank may host them. Raises StartupError (exit code 3): one is taken."""
        env = self._env
        first = env.rank - env.local_rank
        if self._layout.lowest_leader(range(first, first + env.local_world_size)) != env.rank:
            return None
        anywhere = self._config.parallel.frontend == "any"
        if env.node_rank != 0 and not anywhere:
            return None
        try:
            return bind_ports(self._config.server)
        except StartupError as error:
            if not anywhere or error.exit_code != EXIT_PORT:
                raise
            log.warning("not a candidate for the front end: %s", error.message)
            return None

    async def _open_front(self, ports: dict[str, socket.socket]) -> None:
        self._front = await FrontHost.open(
            self._config, self._layout, ports, run_dir=self._run_dir.path, host=self._host
        )
        self._front_opened.set()

    async def _front_failed(self) -> Stop:
        await self._front_opened.wait()
        return await self._front_of().wait_failed()

    async def _serve(self, signals: Signals, ports: dict[str, socket.socket] | None) -> Stop:
        life: asyncio.Task[Stop] = self._spawn(self._live(ports))
        drain = self._spawn(_waited(signals.drain))
        end = self._spawn(_waited(signals.end))
        failed: asyncio.Task[Stop] = self._spawn(self._front_failed())
        await asyncio.wait({life, drain, end, failed}, return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            return self._forced(signals)
        if life.done():
            return life.result()
        if failed.done():
            stop = failed.result()
            await self._front_of().dispatcher.stop_world(stop)
            return stop
        draining: asyncio.Task[Stop] = self._spawn(self._drain(life))
        await asyncio.wait({draining, end}, return_when=asyncio.FIRST_COMPLETED)
        return draining.result() if draining.done() else self._forced(signals)

    async def _live(self, ports: dict[str, socket.socket] | None) -> Stop:
        """Until the dispatcher says stop. Raises StartupError, or DispatcherLostError as such an end."""
        try:
            return await self._live_in_group(ports)
        except ExceptionGroup as group:
            first = group.exceptions[0]
            if isinstance(first, DispatcherLostError):
                raise StartupError(str(first), exit_code=EXIT_WORLD_LOST) from None
            raise first from None

    async def _live_in_group(self, ports: dict[str, socket.socket] | None) -> Stop:
        """Nursery, front end, worker and control connection."""
        if self._env.local_rank == 0 and self._forks:
            self._nursery = NurseryWatch(
                self._run_dir.path,
                self._env.rank,
                self._config,
                lambda info: self._control.report(NurseryStarted(process=info)),
            )
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._nursery.run())] if self._nursery else []
            if self._nursery is not None:
                # It imports for seconds: let it begin before this process imports the front end.
                await self._nursery.launched.wait()
            if ports is not None:
                await self._open_front(ports)
            await self._store.start()
            helpers += [group.create_task(self._store.run()), group.create_task(self._worker.run())]
            world = await self._world
            await self._settle_election(world)
            stop = await self._control.run(world)
            for helper in helpers:
                helper.cancel()
        return stop

    async def _settle_election(self, world: WorldRecord) -> None:
        if self._front is not None and world.elected_rank != self._env.rank:
            log.info("rank %d hosts the front end; closing the port here", world.elected_rank)
            front, self._front = self._front, None
            await front.close()

    async def _drain(self, life: asyncio.Task[Stop]) -> Stop:
        """The elected rank finishes what is accepted and then stops the world; the others wait for its word."""
        deadline_s = self._config.lifecycle.drain_deadline_s
        if self._front is None:
            await asyncio.wait({life}, timeout=deadline_s + LAST_GRACE_S if self._world.done() else 0.0)
            if not life.done():
                return Stop(exit_code=EXIT_DRAIN_CUT if self._world.done() else 0)
            # Without a dispatcher there is nothing to wait for: draining is over.
            return life.result() if life.exception() is None else Stop(exit_code=0)
        log.info("draining")
        started = time.monotonic()
        clean = await self._front.drain(deadline_s)
        stop = Stop(exit_code=0 if clean else EXIT_DRAIN_CUT)
        await self._front.dispatcher.stop_world(stop)
        log.info("drained in %.2f s", time.monotonic() - started)
        return stop

    async def _close(self, *, forced: bool) -> None:
        if forced:
            self._worker.kill()
        else:
            await self._worker.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._front is not None:
            await self._front.close()
        self._store.kill()
        if self._nursery is not None:
            await self._nursery.close()

    # -- small parts

    def _forced(self, signals: Signals) -> Stop:
        return Stop(exit_code=128 + signals.received if signals.received else EXIT_WORLD_LOST)

    def _front_of(self) -> FrontHost:
        assert self._front is not None
        return self._front

    def _on_joined(self, world: WorldRecord) -> None:
        if not self._world.done():
            self._world.set_result(world)

    def _spec(self, epoch: int, attempt: int, world: WorldRecord | None) -> WorkerSpec:
        env = self._env
        endpoint: Endpoint | None = self._front.endpoint if self._front else None
        return WorkerSpec(
            config=self._config.to_json(),
            rank=env.rank,
            local_rank=env.local_rank,
            local_world_size=env.local_world_size,
            dp_size=self._layout.dp_size,
            tp_size=self._layout.tp_size,
            store_host=self._store.host,
            store_port=self._store.port,
            run_dir=str(self._run_dir.path),
            host=self._host,
            keeper_id=self._id,
            attempt=attempt,
            epoch=epoch,
            world=world,
            endpoint=endpoint,
            asked_at=time.monotonic(),
        )

    def _process(self) -> ProcessInfo:
        dp_rank, tp_rank = self._layout.coordinates(self._env.rank)
        return ProcessInfo(
            rank=self._env.rank, dp_rank=dp_rank, tp_rank=tp_rank, role="keeper", pid=os.getpid(), epoch=None
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task


async def _waited(event: asyncio.Event) -> None:
    await event.wait()


def _tower_page(run_dir: Path, rank: int, max_jobs: int) -> TowerPage:
    try:
        return TowerPage.create(tower_page_path(run_dir, rank), max_jobs)
    except OSError as error:
        raise StartupError(f"a file of a few kilobytes cannot be made in {run_dir}: {error.strerror}") from None


def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "transformers", "pyzmq", "fastapi"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
