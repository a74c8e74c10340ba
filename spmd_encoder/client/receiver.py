"""`EmbeddingReceiver`: the socket of a language server to which encoders push embeddings (`"destination": "zmq"`)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Self

import zmq
import zmq.asyncio

from spmd_encoder.client.arrays import ArrayKind
from spmd_encoder.client.item_frames import MAX_HEADER_BYTES, BadFrameError, Received, read_frames

log = logging.getLogger(__name__)

_WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})


class EmbeddingReceiver:
    """Binds a PULL socket, and yields a `Received(header, array)` per item: `for header, array in receiver`, or
    `async for`, in whichever one thread or event loop uses it.

    `endpoint` is what a request names. `host` is an address of this machine; a wildcard (`0.0.0.0`) needs
    `advertised_host`, the name under which encoders reach it. `max_bytes` bounds one embedding (a peer that sends a
    larger one is cut off), `max_queued` the messages that wait here unread. `as_="torch"` gives CPU tensors; numpy
    has no bfloat16, which becomes float32.

    A message that is none of ours is dropped, counted in `num_rejected` and logged; nothing is ever unpickled. There
    is no authentication: bind it to a network that you trust. Raises OSError where the address cannot be bound.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertised_host: str | None = None,
        max_bytes: int = 2**30,
        max_queued: int = 1024,
        as_: ArrayKind = "numpy",
    ) -> None:
        if host in _WILDCARDS and advertised_host is None:
            raise ValueError(f"host={host!r} needs advertised_host: the name under which encoders reach this machine")
        if max_bytes < 1 or max_queued < 1:
            raise ValueError("max_bytes and max_queued must be at least 1")
        self.num_rejected = 0
        self._as = as_
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._async: zmq.asyncio.Socket | None = None
        try:
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            self._socket.setsockopt(zmq.RCVHWM, max_queued)
            self._socket.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, MAX_HEADER_BYTES))
            self._socket.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot bind {host}:{port}: {error.strerror}") from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.endpoint = f"tcp://{_bracketed(advertised_host or host)}:{bound}"

    def receive(self, timeout_s: float | None = None) -> Received:
        """The next embedding, or failure. Raises TimeoutError, and ValueError after `close`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check_open()
            left_ms = None if end is None else max(0, round((end - time.monotonic()) * 1000))
            if not self._socket.poll(left_ms):
                raise TimeoutError(f"nothing was received within {timeout_s} s")
            if (received := self._read(self._socket.recv_multipart(copy=False))) is not None:
                return received

    async def receive_async(self) -> Received:
        """The same in an event loop; `asyncio.timeout` bounds it."""
        while True:
            self._check_open()
            if self._async is None:
                self._async = zmq.asyncio.Socket(self._socket)
            if (received := self._read(await self._async.recv_multipart(copy=False))) is not None:
                return received

    def close(self) -> None:
        """What was not read is lost. May be called again."""
        if self._async is not None:
            self._async.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def __iter__(self) -> Iterator[Received]:
        while not self._socket.closed:
            yield self.receive()

    async def __aiter__(self) -> AsyncIterator[Received]:
        while not self._socket.closed:
            yield await self.receive_async()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, frames: list[zmq.Frame]) -> Received | None:
        try:
            return read_frames([frame.buffer for frame in frames], self._as)
        except BadFrameError as error:
            self.num_rejected += 1
            if self.num_rejected & (self.num_rejected - 1) == 0:  # the 1st, 2nd, 4th, ...: a stranger may send many
                log.warning("message number %d that is none of ours was dropped: %s", self.num_rejected, error)
            return None

    def _check_open(self) -> None:
        if self._socket.closed:
            raise ValueError("the receiver is closed")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
