"""Connections that cost the same however many there are: each has a pool of its own.

httpx's pool looks at all of its connections for each that is idle, whenever a request begins or ends: for a thousand
that takes far more than the requests.
"""

from __future__ import annotations

import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Generic, TypeVar

import httpx

_IDLE_S = 30.0
# A second connection in a lane is one that was lost; it keeps nobody waiting.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1, keepalive_expiry=_IDLE_S)

Lane = TypeVar("Lane")


class _Lanes(Generic[Lane]):
    """The last one used goes first, so that those that are not needed grow old and are closed."""

    def __init__(self, make: Callable[[], Lane], idle_s: float) -> None:
        self._make = make
        self._idle_s = idle_s
        self._idle: deque[tuple[float, Lane]] = deque()
        self.all: set[Lane] = set()

    def take(self) -> Lane:
        try:
            return self._idle.pop()[1]
        except IndexError:
            lane = self._make()
            self.all.add(lane)
            return lane

    def give_back(self, lane: Lane) -> Lane | None:
        """One that is to be closed, since it had nothing to do for long."""
        now = time.monotonic()
        self._idle.append((now, lane))
        try:
            since, oldest = self._idle.popleft()
        except IndexError:
            return None
        if now - since <= self._idle_s:
            self._idle.appendleft((since, oldest))
            return None
        self.all.discard(oldest)
        return oldest


class Lanes(httpx.BaseTransport):
    """Threads may share it. What had nothing to do for `idle_s` is closed."""

    def __init__(self, tls: ssl.SSLContext, idle_s: float = _IDLE_S) -> None:
        self._lanes = _Lanes(lambda: httpx.HTTPTransport(verify=tls, trust_env=False, limits=_LIMITS), idle_s)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        lane = self._lanes.take()
        try:
            response = lane.handle_request(request)
        except BaseException:
            self._give_back(lane)
            raise
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Stream(response.stream, lambda: self._give_back(lane))
        return response

    def close(self) -> None:
        for lane in list(self._lanes.all):
            lane.close()

    def _give_back(self, lane: httpx.HTTPTransport) -> None:
        if (old := self._lanes.give_back(lane)) is not None:
            old.close()


class AsyncLanes(httpx.AsyncBaseTransport):
    """Of one event loop. What had nothing to do for `idle_s` is closed."""

    def __init__(self, tls: ssl.SSLContext, idle_s: float = _IDLE_S) -> None:
        self._lanes = _Lanes(lambda: httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=_LIMITS), idle_s)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        lane = self._lanes.take()
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            await self._give_back(lane)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _AsyncStream(response.stream, lambda: self._give_back(lane))
        return response

    async def aclose(self) -> None:
        for lane in list(self._lanes.all):
            await lane.aclose()

    async def _give_back(self, lane: httpx.AsyncHTTPTransport) -> None:
        if (old := self._lanes.give_back(lane)) is not None:
            await old.aclose()


class _Stream(httpx.SyncByteStream):
    """A reply's body; `on_close` is called once, after its end."""

    def __init__(self, stream: httpx.SyncByteStream, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close: Callable[[], None] | None = on_close

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            self._stream.close()
        finally:
            if on_close is not None:
                on_close()


class _AsyncStream(httpx.AsyncByteStream):
    """As `_Stream`."""

    def __init__(self, stream: httpx.AsyncByteStream, on_close: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._on_close: Callable[[], Awaitable[None]] | None = on_close

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece

    async def aclose(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            await self._stream.aclose()
        finally:
            if on_close is not None:
                await on_close()
