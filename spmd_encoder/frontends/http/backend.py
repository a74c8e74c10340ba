"""What all routes that encode stand on: the service, its configuration, threads, and the fetcher of URLs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.frontends.account import Account
from spmd_encoder.frontends.base import ItemLimits
from spmd_encoder.frontends.destinations import Destinations
from spmd_encoder.frontends.http.body import Timeouts
from spmd_encoder.frontends.remote import Fetcher

T = TypeVar("T")
INLINE_BYTES = 32 * 1024
"""Bodies up to this size are read on the event loop: a change of threads costs more than most of them, and the worst
that are known (headers and bodies in thousands of pieces) take some 12 ms."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Owned by the application; `pool`, `fetcher` and `destinations` are closed by whoever made them."""

    service: EncoderService
    config: Config
    pool: Executor
    fetcher: Fetcher
    destinations: Destinations
    timeouts: Timeouts

    @cached_property
    def item_limits(self) -> ItemLimits:
        return ItemLimits.of(self.config)

    @property
    def max_items(self) -> int:
        return self.config.server.max_items_per_request

    def account(self, held: ExitStack) -> Account:
        """A new request's account, closed with `held`."""
        return Account(self.service, held, max_bytes=self.config.limits.max_inflight_bytes)

    async def run(self, job: Callable[[], T]) -> T:
        """The result of `job`, which is too heavy for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, job)

    async def read(self, job: Callable[[], T], num_bytes: int) -> T:
        """The result of `job`, which reads a body of `num_bytes`: off the event loop, but for small ones."""
        return job() if num_bytes <= INLINE_BYTES else await self.run(job)
