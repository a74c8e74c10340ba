"""The dispatcher's side of the control connections: one stream per keeper of the world."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from pathlib import Path

from spmd_encoder.observability.logging import SparseLog
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.messages import PROTOCOL_VERSION, FromKeeper, KeeperHello, ToKeeper
from spmd_encoder.wire.streams import Listener, Stream

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 10.0
MAX_HELLO_BYTES = 2**16
"""A stranger can make the dispatcher hold no more than this."""
MAX_UNKNOWN = 64
"""Connections that have not said hello; with one more the oldest is closed, since a keeper says it at once."""


class ControlServer:
    """Admits keepers that show the world's token. `on_message` gets every message, `on_lost` the rank of a lost one."""

    def __init__(
        self, token: str, world_size: int, on_message: Callable[[FromKeeper], None], on_lost: Callable[[int], None]
    ) -> None:
        self._token = token
        self._world_size = world_size
        self._on_message = on_message
        self._on_lost = on_lost
        self._streams: dict[int, Stream[FromKeeper]] = {}
        self._listener: Listener | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._unknown: dict[Stream[FromKeeper], None] = {}  # in the order of their coming
        self._strangers = SparseLog(log)
        self.closing = False

    async def open(self, *, path: Path | None, host: str) -> str:
        """Listen; returns the address for `wire.streams.connect`."""
        self._listener = await Listener.open(self._accept, path=path, host=host)
        return self._listener.address

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._streams)

    def send(self, rank: int, message: ToKeeper) -> None:
        if (stream := self._streams.get(rank)) is not None:
            stream.send(message)

    def drop(self, rank: int) -> None:
        """Hang up on a keeper; if it lives it will connect again."""
        if (stream := self._streams.get(rank)) is not None:
            stream.close()

    def broadcast(self, message: ToKeeper) -> None:
        for stream in self._streams.values():
            stream.send(message)

    async def flush(self) -> None:
        await asyncio.gather(*(stream.flush() for stream in self._streams.values()))

    def close(self) -> None:
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for stream in self._streams.values():
            stream.close()
        for task in self._serving:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream: Stream[FromKeeper] = Stream(reader, writer, FromKeeper)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(stream)
        except WireError as error:
            self._strangers.warning("control connection closed: %s", error)
        finally:
            self._serving.discard(task)
            stream.close()

    async def _serve(self, stream: Stream[FromKeeper]) -> None:
        if len(self._unknown) >= MAX_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.abort()
        self._unknown[stream] = None
        try:
            hello = await asyncio.wait_for(stream.receive(MAX_HELLO_BYTES), HELLO_TIMEOUT_S)
        except TimeoutError:
            return
        finally:
            self._unknown.pop(stream, None)
        if not isinstance(hello, KeeperHello) or not self._belongs(hello):
            self._strangers.warning("control connection refused: not a keeper of this world")
            return
        self._streams[hello.rank] = stream
        try:
            self._on_message(hello)
            while (message := await stream.receive()) is not None:
                self._on_message(message)
        finally:
            # Also where the keeper sent what is no message: its connection is closed then.
            if self._streams.get(hello.rank) is stream:
                del self._streams[hello.rank]
                if not self.closing:
                    self._on_lost(hello.rank)

    def _belongs(self, hello: KeeperHello) -> bool:
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        return known and hello.protocol == PROTOCOL_VERSION and 0 <= hello.rank < self._world_size
