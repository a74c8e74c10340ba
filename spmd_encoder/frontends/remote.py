"""Items that are URLs: fetched all at once, each with its own outcome, then read like bytes that came inline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.base import ItemLimits, ItemNaming, ParsedItem, RemoteItem, SourceItem, item_name, read_item


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
        return await loop.run_in_executor(pool, read_item, source.modality, data, limits, name(index))

    async with asyncio.TaskGroup() as group:
        tasks = {
            index: group.create_task(fetched(index, source))
            for index, source in enumerate(sources)
            if isinstance(source, RemoteItem)
        }
    return [tasks[index].result() if isinstance(source, RemoteItem) else source for index, source in enumerate(sources)]
