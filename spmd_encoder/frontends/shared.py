"""What all front ends of one server share: threads, the fetcher of URLs, SGLang's parts, and what they measure.

A part that is registered over one protocol may be encoded over another.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.frontends.destinations import Destinations
from spmd_encoder.frontends.remote import Fetcher
from spmd_encoder.frontends.sglang.dialect import SglangDialect
from spmd_encoder.frontends.sglang.metrics import DialectMetrics
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.media.fetch import MediaFetcher
from spmd_encoder.transports.budget import StagedBytes
from spmd_encoder.transports.memory_writer import MemoryWriter
from spmd_encoder.transports.registry import Resources, load_backend, push_backend

_NUM_THREADS = 2
_NUM_WRITERS = 4
_NUM_LOOK_UPS = 16


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Made and closed by whoever hosts the front ends."""

    pool: Executor
    fetcher: Fetcher
    dialect: SglangDialect
    destinations: Destinations
    registry: CollectorRegistry

    @classmethod
    def open(cls, service: EncoderService, config: Config, *, writer: MemoryWriter | None = None) -> Shared:
        """`writer` is what `load_writer` made; it is closed with the rest."""
        pool, fetcher, registry = new_pool(), MediaFetcher(config.media), CollectorRegistry()
        resources = replace(new_resources(config), writer=writer)
        dialect = new_dialect(service, config, resources, pool=pool, fetcher=fetcher, registry=registry)
        destinations = Destinations(config, resources, registry)
        return cls(pool=pool, fetcher=fetcher, dialect=dialect, destinations=destinations, registry=registry)

    async def close(self) -> None:
        await self.dialect.close()
        await self.destinations.close()
        await self.fetcher.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def new_pool() -> ThreadPoolExecutor:
    """Threads for parsing and rendering what is too large for the event loop."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="front-end")


def new_resources(config: Config) -> Resources:
    """What all ways of embeddings to their receivers share, whatever the protocol."""
    return Resources(
        budget=StagedBytes(config.sglang.max_staged_bytes),
        run=DaemonThreads(_NUM_WRITERS, "embedding-dir").run,
        run_look_ups=DaemonThreads(_NUM_LOOK_UPS, "push-look-up").run,
    )


def new_dialect(
    service: EncoderService,
    config: Config,
    resources: Resources,
    *,
    pool: Executor,
    fetcher: Fetcher,
    registry: CollectorRegistry,
) -> SglangDialect:
    """SGLang's calls over the backend that the configuration names. It is closed by whoever asked for it."""
    push = push_backend(config.sglang.encoder_transfer_backend)
    metrics = DialectMetrics(registry, push.name)
    dialect = SglangDialect(
        service,
        config,
        pool=pool,
        fetcher=fetcher,
        transport=load_backend(config, resources),
        budget=resources.budget,
        metrics=metrics,
        is_fetched=push.is_fetched,
    )
    metrics.count_parts(lambda: dialect.num_parts)
    return dialect
