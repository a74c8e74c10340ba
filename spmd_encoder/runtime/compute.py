"""Composition root of a worker: one rank's part of its replica, in the process that holds the model."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import setproctitle

from spmd_encoder.api.processes import ProcessStarter
from spmd_encoder.api.stillness import Stillness
from spmd_encoder.config import Config, cache_dir
from spmd_encoder.distributed.groups import TorchStore, agree, connect_store
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.distributed.rollcall import Facts, close_start, roll_call, was_aborted
from spmd_encoder.errors import StartupError
from spmd_encoder.models.checkpoint import resolve_checkpoint
from spmd_encoder.models.own_code import came_of_a_collective, in_a_line
from spmd_encoder.observability.logging import Origin, set_up_logging
from spmd_encoder.runtime.facts import versions_fact, weights_fact
from spmd_encoder.runtime.local import EncoderRuntime, launch_local_runtime
from spmd_encoder.runtime.phases import Phases
from spmd_encoder.wire.messages import Beat, Joined, PreparerSpec, StopWorker, WorkerFailing, WorkerSpec, WorldRecord
from spmd_encoder.wire.streams import Pipe, Stream, over_socket
from spmd_encoder.worker.allocator import keep_freed_memory
from spmd_encoder.worker.compute import ComputeThread

log = logging.getLogger(__name__)

BEAT_S = 0.25
EXIT_WORKER_DIED = 4
AGREEMENT_TIMEOUT_S = 60.0


class _StartAbortedError(Exception):
    """A member fell out between roll call and agreement: this worker ends and its successor answers a new call."""


def run_worker(spec: WorkerSpec, pipe: Pipe, starter: ProcessStarter[PreparerSpec]) -> int:
    """The worker's whole life; returns its exit code. Every end is one line, and told to the keeper.

    `starter` starts the processes that decode and preprocess for it.
    """
    phases = Phases(spec.asked_at)
    phases.done("imports")
    preloaded = "transformers.modeling_utils" in sys.modules
    config = Config.from_json(spec.config)
    layout = Layout(spec.dp_size, spec.tp_size)
    dp_rank, tp_rank = layout.coordinates(spec.rank)
    origin = Origin(spec.rank, dp_rank, tp_rank, "worker", spec.epoch)
    setproctitle.setproctitle(origin.title())
    set_up_logging(origin, config.observability.log_level, config.observability.log_format)
    keep_freed_memory()
    try:
        asyncio.run(_live(spec, config, layout, pipe, starter, phases, preloaded))
        return 0
    except Exception as raised:
        return _last_words(first_leaf(raised), pipe)


def _last_words(error: BaseException, pipe: Pipe) -> int:
    """What the log and the keeper are told of `error`, which ends the worker; the exit code."""
    match error:
        case StartupError():
            pipe.send(WorkerFailing(reason=error.message, exit_code=error.exit_code, fatal=True))
            return error.exit_code
        case _StartAbortedError():
            log.warning("%s", error)
        case _:
            reason = in_a_line(error)
            pipe.send(WorkerFailing(reason=reason, exit_code=EXIT_WORKER_DIED, fatal=False))
            # Where a peer has gone its own end is what tells something.
            traced = log.isEnabledFor(logging.DEBUG) or not came_of_a_collective(error)
            log.error("the worker ends: %s", reason, exc_info=error if traced else None)
    return EXIT_WORKER_DIED


def first_leaf(error: BaseException) -> BaseException:
    """What was raised in a task, where a group of tasks tells it as a group of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _live(
    spec: WorkerSpec,
    config: Config,
    layout: Layout,
    pipe: Pipe,
    starter: ProcessStarter[PreparerSpec],
    phases: Phases,
    preloaded: bool,
) -> None:
    compute = ComputeThread()
    async with AsyncExitStack() as stack:
        life = _Life(spec, config, layout, pipe, starter, compute, phases, stack)
        beats = asyncio.create_task(life.beat(preloaded))
        work = asyncio.create_task(life.work())
        stop = asyncio.create_task(life.wait_for_stop())
        try:
            await asyncio.wait({beats, work, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, beats):
                if task.done():
                    task.result()
        finally:
            if stop.done():
                # Only on demand: after a crash nothing is answered, since the dispatcher sends it elsewhere.
                life.stop()
            for task in (beats, work, stop):
                task.cancel()


class _Life:
    def __init__(
        self,
        spec: WorkerSpec,
        config: Config,
        layout: Layout,
        pipe: Pipe,
        starter: ProcessStarter[PreparerSpec],
        compute: ComputeThread,
        phases: Phases,
        stack: AsyncExitStack,
    ) -> None:
        self._spec = spec
        self._config = config
        self._layout = layout
        self._pipe = pipe
        self._starter = starter
        self._compute = compute
        self._phases = phases
        self._stack = stack
        self._runtime: EncoderRuntime | None = None

    async def work(self) -> None:
        spec, config = self._spec, self._config
        folder = await self._compute.submit(
            lambda: resolve_checkpoint(config.model.model_path, config.model.revision, cache_dir())
        )
        world = spec.world
        if world is None:
            world = await self._compute.submit(lambda: join_world(spec, config, self._layout, folder, self._pipe))
        self._pipe.send(Joined(world=world))
        self._phases.done("rendezvous")
        self._runtime = await launch_local_runtime(
            spec,
            config,
            self._layout,
            world,
            folder,
            compute=self._compute,
            pipe=self._pipe,
            starter=self._starter,
            phases=self._phases,
            stack=self._stack,
        )
        await self._runtime.serve()

    async def beat(self, preloaded: bool) -> None:
        stillness = Stillness(BEAT_S)
        while True:
            self._compute.slept(stillness.gap_s())
            last_order = self._runtime.last_order if self._runtime else -1
            busy_s = self._compute.busy_s if self._runtime else 0.0
            preparers = self._runtime.preparers if self._runtime else ()
            self._pipe.send(Beat(last_order=last_order, busy_s=busy_s, preloaded=preloaded, preparers=preparers))
            await asyncio.sleep(BEAT_S)

    async def wait_for_stop(self) -> None:
        """Until the keeper says stop, or has gone."""
        stream: Stream[StopWorker] = await over_socket(self._pipe.sock, StopWorker)
        await stream.receive()

    def stop(self) -> None:
        if self._runtime is not None:
            self._runtime.stop()


def join_world(spec: WorkerSpec, config: Config, layout: Layout, folder: Path, pipe: Pipe) -> WorldRecord:
    """Roll call, election, agreement over the mesh. Blocks; on the compute thread."""
    timeout_s = config.lifecycle.start_deadline_s
    store = connect_store(spec.store_host, spec.store_port, timeout_s=timeout_s)
    start = roll_call(
        store,
        rank=spec.rank,
        world_size=layout.world_size,
        keeper_id=spec.keeper_id,
        attempt=spec.attempt,
        facts=Facts(config=spec.config, endpoint=spec.endpoint),
        timeout_s=timeout_s,
    )
    name = start.world.start_name
    if start.formed:
        # The world serves and waits for this rank: have the keeper report a worker that is gone.
        pipe.send(Joined(world=start.world))
        raise _StartAbortedError("the world was formed while this worker was away")
    over = threading.Event()
    watch = threading.Thread(target=_end_when_aborted, args=(spec, name, over), daemon=True, name="start-watch")
    watch.start()
    try:
        facts = {"versions": versions_fact(), "weights": weights_fact(folder), "configuration": spec.config}
        agree(store, layout, spec.rank, start_name=name, facts=facts, timeout_s=AGREEMENT_TIMEOUT_S)
        stands = close_start(store, name)
    finally:
        over.set()
    watch.join()
    if not stands:
        raise _StartAbortedError("the start was aborted by a member that came again")
    return start.world


def _end_when_aborted(spec: WorkerSpec, name: str, over: threading.Event) -> None:
    """A peer that died leaves the others stuck in a collective that only ends at its timeout: end them at once."""
    store: TorchStore = connect_store(spec.store_host, spec.store_port, timeout_s=10.0)
    while not over.wait(0.05):
        if was_aborted(store, name):
            log.warning("the start %s was aborted; starting again", name)
            os._exit(EXIT_WORKER_DIED)
