"""`AsyncClient`: the asyncio driver."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import Any, Self, TypeVar

import httpx
from numpy.typing import NDArray

from spmd_encoder.client.arrays import ArrayKind, check_kind
from spmd_encoder.client.base import ClientBase
from spmd_encoder.client.chunks import Chunker
from spmd_encoder.client.destinations import Destination, StagedReceipt, check_hashes
from spmd_encoder.client.flows import Broken, Digest, Flow, Load, OutputKind, Pause, Send, Wait
from spmd_encoder.client.lanes import AsyncLanes
from spmd_encoder.client.lookup import Held
from spmd_encoder.client.reply import Reply
from spmd_encoder.client.results import Result, all_good, stack
from spmd_encoder.client.sources import MediaLike, Source, reject_single, source_of
from spmd_encoder.client.transport import Collector, broken, request_arguments

T = TypeVar("T")
Images = Iterable[MediaLike] | AsyncIterable[MediaLike]


class AsyncClient(ClientBase):
    """The same calls as `Client`, awaited. It belongs to one event loop, and not to a process forked from it.

    `concurrency` holds for all that it encodes, looks up and fetches together. Cancelling a call closes its
    connections, upon which the server drops what has not begun. Files are read, and pictures written as PNG, in
    threads.
    """

    def _open(self) -> None:
        transport = AsyncLanes(self._arguments["verify"])
        self._http = httpx.AsyncClient(**self._arguments, transport=transport)
        self._slots = asyncio.Semaphore(self._concurrency)

    async def encode(
        self,
        images: Images,
        *,
        output: OutputKind | None = None,
        as_: ArrayKind = "numpy",
        destination: Destination | None = None,
        raise_on_error: bool = True,
    ) -> list[Result]:
        """As `Client.encode`."""
        reject_single(images)
        results = [result async for result in self.encode_iter(images, output=output, as_=as_, destination=destination)]
        return all_good(results) if raise_on_error else results

    def encode_iter(
        self,
        images: Images,
        *,
        output: OutputKind | None = None,
        as_: ArrayKind = "numpy",
        destination: Destination | None = None,
    ) -> AsyncGenerator[Result, None]:
        """As `Client.encode_iter`; `images` may be asynchronous too. Leave it early by `aclose()`."""
        reject_single(images)
        check_hashes(destination, images)
        check_kind(as_)
        return self._results(images, output, as_, destination)

    async def embed(self, images: Images) -> NDArray[Any]:
        """As `Client.embed`."""
        return stack(await self.encode(images, output="pooled"))

    async def lookup(self, images: Iterable[MediaLike], *, output: OutputKind | None = None) -> list[Held]:
        """As `Client.lookup`."""
        reject_single(images)
        sources = [source_of(image, index) for index, image in enumerate(images)]
        return await self._in_turn(self._flows.lookup(sources, output))

    async def fetch(self, staged: StagedReceipt | str, *, keep: bool = False, as_: ArrayKind = "numpy") -> Result:
        """As `Client.fetch`."""
        check_kind(as_)
        return await self._in_turn(self._flows.fetch(staged, keep, as_))

    async def models(self) -> list[dict[str, Any]]:
        """As `Client.models`."""
        return await self._run(self._flows.models())

    async def info(self) -> dict[str, Any]:
        """As `Client.info`."""
        return await self._run(self._flows.info())

    async def ready(self) -> bool:
        """As `Client.ready`."""
        return await self._run(self._flows.ready())

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """As `Client.wait_ready`."""
        await self._run(self._flows.wait_ready(timeout_s))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _results(
        self, images: Images, output: OutputKind | None, as_: ArrayKind, to: Destination | None
    ) -> AsyncGenerator[Result, None]:
        window: deque[asyncio.Task[list[Result]]] = deque()
        try:
            async for chunk in self._chunks(images):
                if len(window) == self._concurrency:
                    for result in await window[0]:
                        yield result
                    window.popleft()
                window.append(asyncio.create_task(self._in_turn(self._flows.encode(chunk, output, as_, to))))
            while window:
                for result in await window[0]:
                    yield result
                window.popleft()
        finally:
            for task in window:
                task.cancel()
            await asyncio.gather(*window, return_exceptions=True)

    async def _chunks(self, images: Images) -> AsyncIterator[list[Source]]:
        chunker = Chunker(self._limits)
        index = 0
        async for image in _each(images):
            if done := chunker.add(source_of(image, index)):
                yield done
            index += 1
        if done := chunker.flush():
            yield done

    async def _in_turn(self, flow: Flow[T]) -> T:
        async with self._slots:
            return await self._run(flow)

    async def _run(self, flow: Flow[T]) -> T:
        outcome: object = None
        with contextlib.closing(flow):
            while True:
                try:
                    step = flow.send(outcome)
                except StopIteration as end:
                    result: T = end.value
                    return result
                match step:
                    case Send():
                        outcome = await self._send(step)
                    case Wait():
                        outcome = await self._wait(step)
                    case Pause():
                        outcome = None
                        await asyncio.sleep(step.seconds)
                    case Load() | Digest():
                        outcome = await asyncio.to_thread(step.run)

    async def _wait(self, step: Wait) -> bool:
        given = asyncio.Event()
        step.turn.wake = given.set
        if not step.turn.is_given:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(step.deadline - time.monotonic()):
                    await given.wait()
        return step.turn.is_given

    async def _send(self, step: Send) -> Reply | Broken:
        try:
            async with (
                asyncio.timeout(step.deadline - time.monotonic()),
                self._http.stream(**request_arguments(step)) as response,
            ):
                body = Collector(response, step.deadline)
                async for piece in response.aiter_raw():
                    body.add(piece)
                return body.reply()
        except (httpx.TransportError, TimeoutError) as error:
            return broken(error, step)


async def _each(images: Images) -> AsyncIterator[MediaLike]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image
