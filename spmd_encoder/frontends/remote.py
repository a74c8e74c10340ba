"""Items that are URLs: fetched all at once, each with its own outcome, then read like bytes that came inline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from spmd_encoder.api.service import EncoderService
from spmd_encoder.api.types import ItemOutcome, OutputKind
from spmd_encoder.errors import EncoderError, time_over
from spmd_encoder.frontends.base import (
    ItemLimits,
    ItemNaming,
    ParsedItem,
    RemoteItem,
    SourceItem,
    encode_items,
    item_name,
    read_item,
)


class Fetcher(Protocol):
    """`media.fetch.MediaFetcher`."""

    async def fetch(self, url: str, *, reserve: Callable[[int], None]) -> bytes: ...

    async def close(self) -> None: ...


async def fetch_items(
    sources: Sequence[SourceItem],
    fetcher: Fetcher,
    *,
    limits: ItemLimits,
    pool: Executor,
    reserve: Callable[[int], None],
    name: ItemNaming = item_name,
) -> list[ParsedItem]:
    """`sources` with every URL fetched, in order; a fetch that fails is that item's failure.

    `reserve` accounts for bytes as they come. Hashing and reading headers happen in `pool`. Cancelling it ends all
    fetches.
    """
    loop = asyncio.get_running_loop()

    async def fetched(index: int, source: RemoteItem) -> ParsedItem:
        try:
            data = await fetcher.fetch(source.url, reserve=reserve)
        except EncoderError as error:
            return error.at(name(index))
        return await loop.run_in_executor(pool, read_item, source.modality, data, limits, name(index), source.options)

    async with asyncio.TaskGroup() as group:
        tasks = {
            index: group.create_task(fetched(index, source))
            for index, source in enumerate(sources)
            if isinstance(source, RemoteItem)
        }
    return [tasks[index].result() if isinstance(source, RemoteItem) else source for index, source in enumerate(sources)]


async def fetch_and_encode(
    service: EncoderService,
    items: Sequence[SourceItem],
    fetcher: Fetcher,
    *,
    limits: ItemLimits,
    pool: Executor,
    reserve: Callable[[int], None],
    request_id: str,
    output: OutputKind | None,
    timeout_s: float,
    check: Callable[[Sequence[ParsedItem]], None],
    name: ItemNaming,
    fetched: Callable[[float], None] = lambda _: None,
) -> list[ItemOutcome]:
    """The outcomes of `items`, those that are URLs fetched first, all within `timeout_s`.

    Items that are bad by then are counted here. `check` may raise before anything is encoded; `fetched` is told how
    many seconds the fetches took, if there were any, also where time was over meanwhile. Raises `EncoderError` where
    the request as a whole fails: DEADLINE_EXCEEDED, or what the service refuses.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = began + timeout_s
    parsed = [item for item in items if not isinstance(item, RemoteItem)]
    if len(parsed) < len(items):
        try:
            async with asyncio.timeout_at(deadline):
                parsed = await fetch_items(items, fetcher, limits=limits, pool=pool, reserve=reserve, name=name)
        except TimeoutError:
            raise time_over("fetch") from None
        finally:
            fetched(loop.time() - began)
    for item in parsed:
        if isinstance(item, EncoderError):
            service.item_refused(item.code)
    check(parsed)
    return await encode_items(
        service, parsed, request_id=request_id, output=output, deadline_s=deadline - loop.time(), name=name
    )
