"""What all front ends of one server share: threads, the fetcher of URLs, SGLang's parts, and what they measure.

A part that is registered over one protocol may be encoded over another.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.frontends.remote import Fetcher
from spmd_encoder.frontends.sglang.dialect import SglangDialect
from spmd_encoder.frontends.sglang.metrics import DialectMetrics
from spmd_encoder.media.fetch import MediaFetcher
from spmd_encoder.transports.registry import load_push, push_backend

_NUM_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Made and closed by whoever hosts the front ends."""

    pool: Executor
    fetcher: Fetcher
    dialect: SglangDialect
    registry: CollectorRegistry

    @classmethod
    def open(cls, service: EncoderService, config: Config) -> Shared:
        pool, fetcher, registry = new_pool(), MediaFetcher(config.media), CollectorRegistry()
        dialect = new_dialect(service, config, pool=pool, fetcher=fetcher, registry=registry)
        return cls(pool=pool, fetcher=fetcher, dialect=dialect, registry=registry)

    async def close(self) -> None:
        await self.dialect.close()
        await self.fetcher.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def new_pool() -> ThreadPoolExecutor:
    """Threads for parsing and rendering what is too large for the event loop."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="front-end")


def new_dialect(
    service: EncoderService, config: Config, *, pool: Executor, fetcher: Fetcher, registry: CollectorRegistry
) -> SglangDialect:
    """SGLang's calls over the backend that the configuration names. It is closed by whoever asked for it."""
    push, settings = push_backend(config.sglang.encoder_transfer_backend), config.sglang
    return SglangDialect(
        service,
        config,
        pool=pool,
        fetcher=fetcher,
        transport=load_push(
            settings.sglang_embedding_class,
            timeout_s=settings.send_timeout_s,
            # Half for a receiver that stands still leaves half for all others.
            max_peer_bytes=settings.max_staged_bytes // 2,
        ),
        metrics=DialectMetrics(registry, push.name),
    )
