"""launch_local_runtime: one rank's part of its replica, and EncoderRuntime, which owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from spmd_encoder.api.processes import ProcessStarter
from spmd_encoder.api.profiling import ProfileOutcome
from spmd_encoder.api.types import Modality, ModelInfo
from spmd_encoder.config import Config
from spmd_encoder.distributed.channel import FollowerChannel, LeaderChannel
from spmd_encoder.distributed.groups import TorchStore, connect_store, epoch_scope, form_tp_group, own_group
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.media.capabilities import decoders
from spmd_encoder.media.pool import PreparerPool
from spmd_encoder.models.base import FamilyAdapter, LoadContext
from spmd_encoder.models.checkpoint import SINGLE, left_aside, read_model_type
from spmd_encoder.models.demo import is_random
from spmd_encoder.models.loading import load_adapter, resolve_dtype, served_modalities, stored_dtype
from spmd_encoder.runtime.engine import TowerEngine
from spmd_encoder.runtime.leader import LeaderLoop
from spmd_encoder.runtime.phases import Phases
from spmd_encoder.runtime.warm_up import SECONDS, Bounds, large_trials, ordinary_trial, small_trials, warm_up
from spmd_encoder.scheduler.batcher import Batcher
from spmd_encoder.scheduler.cache import ResultCache
from spmd_encoder.scheduler.scheduler import EncoderScheduler
from spmd_encoder.wire.messages import PROTOCOL_VERSION, Hello, PreparerSpec, ToScheduler, WorkerSpec, WorldRecord
from spmd_encoder.wire.sockets import Context, DealerSocket, new_context
from spmd_encoder.wire.streams import Pipe
from spmd_encoder.wire.tower_page import TowerPage, tower_page_path
from spmd_encoder.worker.allocator import give_back_freed_memory
from spmd_encoder.worker.compute import ComputeThread
from spmd_encoder.worker.device import default_preparers, pick_device, set_thread_count
from spmd_encoder.worker.encoder import MMEncoder
from spmd_encoder.worker.faults import Faults
from spmd_encoder.worker.profiling import Profiler
from spmd_encoder.worker.spread import SpreadItems, SpreadWeights
from spmd_encoder.worker.worker import FollowerWorker, LeaderWorker

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 60.0
LOOKAHEAD_BATCHES = 2


class RankLoop(Protocol):
    """What a rank does while serving: a leader's loop or a follower's."""

    async def serve(self) -> None: ...

    def stop(self) -> None: ...

    @property
    def last_order(self) -> int: ...

    @property
    def preparers(self) -> tuple[int, ...]: ...


@dataclass
class EncoderRuntime:
    """One rank's part of one replica in one epoch."""

    loop: RankLoop

    async def serve(self) -> None:
        """Until stopped. An exception means that this worker must end; its replica is then formed anew."""
        await self.loop.serve()

    def stop(self) -> None:
        self.loop.stop()

    @property
    def last_order(self) -> int:
        return self.loop.last_order

    @property
    def preparers(self) -> tuple[int, ...]:
        """Pids of the processes that prepare items; none on a follower."""
        return self.loop.preparers


@dataclass(frozen=True)
class _Place:
    """Where this runtime stands and what it may use."""

    spec: WorkerSpec
    config: Config
    layout: Layout
    world: WorldRecord
    folder: Path
    compute: ComputeThread
    pipe: Pipe
    starter: ProcessStarter[PreparerSpec]
    phases: Phases
    stack: AsyncExitStack
    context: Context

    @property
    def replica(self) -> int:
        return self.layout.coordinates(self.spec.rank)[0]

    @property
    def tp_rank(self) -> int:
        return self.layout.coordinates(self.spec.rank)[1]


async def launch_local_runtime(
    spec: WorkerSpec,
    config: Config,
    layout: Layout,
    world: WorldRecord,
    folder: Path,
    *,
    compute: ComputeThread,
    pipe: Pipe,
    starter: ProcessStarter[PreparerSpec],
    phases: Phases,
    stack: AsyncExitStack,
) -> EncoderRuntime:
    """Form the TP group of this epoch, load this rank's shard and, on the leader, warm the group up.

    Runs in every rank's worker. `stack` undoes it all. Raises StartupError for what trying again cannot help.
    """
    context = new_context()
    stack.callback(context.destroy, linger=0)
    place = _Place(spec, config, layout, world, folder, compute, pipe, starter, phases, stack, context)
    build = _build_leader if layout.is_leader(spec.rank) else _build_follower
    loop = await build(place)
    log.info("serving replica %d as epoch %d: %s", place.replica, spec.epoch, phases)
    return EncoderRuntime(loop)


async def _build_leader(place: _Place) -> RankLoop:
    spec, config = place.spec, place.config
    faults = Faults.parse(config.faults)
    channel = _open_channel(place)
    place.stack.callback(channel.close)
    # They start while this rank loads.
    pool = _open_pool(place)
    place.stack.push_async_callback(pool.close)
    if unused := left_aside(place.folder):
        log.warning(
            "%s has both %s and %s: the index is left aside, as transformers does", place.folder, SINGLE, unused
        )
    encoder = await place.compute.submit(lambda: _load(place, orders_address=channel.address))
    await channel.wait_for_followers(config.lifecycle.collective_timeout_s)
    place.phases.done("load")
    worker = LeaderWorker(encoder, place.compute, channel, _profiler(place, encoder))
    engine = TowerEngine(encoder.adapter, worker, pool, faults, pins=encoder.device.type == "cuda")
    modalities = served_modalities(encoder.adapter)
    if config.lifecycle.warm_up:
        await _warm_up(place, encoder, engine, modalities)
        await place.compute.submit(give_back_freed_memory)  # its batches are larger than most that come
        place.phases.done("warm_up")
    # The dispatcher's probe comes at once, and its time is for a picture and not for a process that imports.
    await pool.wait_ready()
    place.phases.done("preparers")
    name = f"replica{place.replica}-epoch{spec.epoch}-{spec.keeper_id}".encode()
    dealer: DealerSocket[ToScheduler] = DealerSocket(
        place.context, ToScheduler, secret=place.world.token, name=name, address=place.world.work_address
    )
    place.stack.callback(dealer.close)
    limits = config.limits
    batcher = Batcher(
        max_items=limits.max_batch_items,
        max_tokens=limits.max_batch_tokens,
        lookahead=LOOKAHEAD_BATCHES * limits.max_batch_items,
    )
    cache = ResultCache(limits.cache_bytes)
    tower = TowerPage.open(tower_page_path(Path(spec.run_dir), spec.rank))
    place.stack.callback(tower.close)
    scheduler = EncoderScheduler(engine, batcher, cache, reply=dealer.send, in_tower=tower.write)
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        config_digest=config.digest(),
        replica=place.replica,
        epoch=spec.epoch,
        model=_model_info(place, encoder.adapter, modalities),
        cost=encoder.adapter.cost_table(),
        load_s=place.phases.seconds["load"],
        tower_bytes=encoder.adapter.tower_bytes,
        start_s=dict(place.phases.seconds),
        decoders=decoders(encoder.adapter.modalities),
    )
    return LeaderLoop(scheduler, dealer, worker, pool, hello)


async def _warm_up(place: _Place, encoder: MMEncoder, engine: TowerEngine, modalities: tuple[Modality, ...]) -> None:
    limits, adapter = place.config.limits, encoder.adapter
    bounds = Bounds(
        max_items=limits.max_batch_items,
        max_tokens=limits.max_batch_tokens,
        max_pixels=place.config.server.max_image_pixels,
    )
    table = adapter.cost_table()
    # A replica that is formed anew has found out already what fits, and others wait for it.
    large = large_trials(table, modalities, bounds) if place.spec.epoch == 0 else []
    done = await warm_up(
        engine.try_out,
        adapter.preprocessor,
        small_trials(table, modalities),
        large,
        ordinary=ordinary_trial(table, modalities),
        folder=place.folder,
        seconds=SECONDS[encoder.device.type],
    )
    log.info("warm-up: %s", done)


async def _build_follower(place: _Place) -> RankLoop:
    encoder = await place.compute.submit(lambda: _load(place, orders_address=None))
    place.phases.done("load")
    address = await place.compute.submit(lambda: _scope(place).get("orders"))
    channel = FollowerChannel(place.context, address=address, tp_rank=place.tp_rank, token=place.world.token)
    place.stack.callback(channel.close)
    return FollowerLoop(FollowerWorker(encoder, place.compute, channel, _profiler(place, encoder)))


class FollowerLoop:
    def __init__(self, worker: FollowerWorker) -> None:
        self._worker = worker

    async def serve(self) -> None:
        await self._worker.follow()
        # The leader stops before this rank's keeper says so; ending first would look like a loss.
        await asyncio.Event().wait()

    def stop(self) -> None:
        return

    @property
    def last_order(self) -> int:
        return self._worker.last_order

    @property
    def preparers(self) -> tuple[int, ...]:
        return ()


def _open_pool(place: _Place) -> PreparerPool:
    config, spec = place.config, place.spec
    preparer = PreparerSpec(
        config=spec.config,
        folder=str(place.folder),
        rank=spec.rank,
        dp_rank=place.replica,
        tp_rank=place.tp_rank,
        epoch=spec.epoch,
    )
    return PreparerPool(
        lambda: place.starter.start(preparer),
        config.limits.preparers or default_preparers(spec.local_world_size),
        timeout_s=config.limits.preprocess_timeout_s,
    )


def _open_channel(place: _Place) -> LeaderChannel:
    spec = place.spec
    path = None
    if not spec.host:
        path = Path(spec.run_dir) / f"orders-{place.replica}-{spec.epoch}"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    followers = {place.layout.coordinates(rank)[1] for rank in place.layout.followers_of(place.replica)}
    return LeaderChannel(place.context, followers, place.world.token, path=path, host=spec.host)


def _profiler(place: _Place, encoder: MMEncoder) -> Profiler:
    who = ProfileOutcome(rank=place.spec.rank, dp_rank=place.replica, tp_rank=place.tp_rank)
    return Profiler(who, encoder.device, place.config.observability.profile_dir)


def _scope(place: _Place) -> TorchStore:
    store = connect_store(place.spec.store_host, place.spec.store_port, timeout_s=STORE_TIMEOUT_S)
    return epoch_scope(store, place.world.start_name, place.replica, place.spec.epoch)


def _load(place: _Place, *, orders_address: str | None) -> MMEncoder:
    """Group and weights; blocks, on the compute thread."""
    spec, config = place.spec, place.config
    threads = set_thread_count(spec.local_world_size)
    device, backend = pick_device(config.model.device, spec.local_rank)
    scope = _scope(place)
    if orders_address is not None:
        scope.set("orders", orders_address)
    group: dist.ProcessGroup = form_tp_group(
        scope, place.layout, spec.rank, backend=backend, timeout_s=config.lifecycle.collective_timeout_s
    )
    dtype = resolve_dtype(config.model.dtype, place.folder)
    if config.model.dtype == "auto" and (stored := stored_dtype(place.folder)) != str(dtype).removeprefix("torch."):
        log.warning("the checkpoint is of %s, in which towers of its family overflow: served in %s", stored, dtype)
    # `holders` are the ranks that hold one copy of the weights.
    holders, spread = (
        (own_group(), SpreadItems(group))
        if config.parallel.mm_encoder_tp_mode == "data"
        else (group, SpreadWeights(group))
    )
    context = LoadContext(dtype=dtype, device=device, group=holders, fast_linears=config.model.fast_linears)
    adapter = load_adapter(place.folder, context)
    dist.barrier(group=group)
    log.debug("loaded on %s with %d threads", device, threads)
    return MMEncoder(adapter, spread, device)


def _model_info(place: _Place, adapter: FamilyAdapter, modalities: tuple[Modality, ...]) -> ModelInfo:
    config = place.config
    dtype: torch.dtype = resolve_dtype(config.model.dtype, place.folder)
    return ModelInfo(
        name=config.served_name,
        family=adapter.family,
        model_type=read_model_type(place.folder),
        dtype=str(dtype).removeprefix("torch."),
        outputs=adapter.outputs,
        default_output=adapter.default_output,
        modalities=modalities,
        embedding_dims=dict(adapter.embedding_dims),
        random_weights=is_random(config.model.model_path) or is_random(place.folder),
        revision=config.model.revision,
    )
