"""ZMQ sockets with typed messages: a ROUTER that serves peers by name, a DEALER that is one of them.

A peer shows the world's secret in the handshake (ZMQ's PLAIN mechanism, RFC 24, judged by ZAP, RFC 27), so that a
stranger's messages are never read. It is a password in the clear, not encryption. ZMQ holds a whole frame before it
looks at it, a stranger's too: so what a ROUTER takes comes in frames of bounded size, larger ones in pieces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from spmd_encoder.wire.codec import Codec, WireError
from spmd_encoder.wire.messages import Message

M = TypeVar("M")
Frames = Sequence[bytes | memoryview]
log = logging.getLogger(__name__)
_DOMAIN, _USER = "spmd_encoder", "member"

_READABLE = int(zmq.POLLIN)
PIECE_BYTES = 4 * 2**20
"""The largest frame that a ROUTER takes: a stranger's connection is worth no more memory than this."""
_HANDSHAKE_MS = 10_000


Context = zmq.asyncio.Context
"""Owner of sockets and their I/O thread; one per process."""


def new_context() -> Context:
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.LINGER, 0)
    return context


class _Mailbox:
    """A plain ZMQ socket in the running loop, read by one task at a time or by a listener; it costs less than
    `zmq.asyncio`'s.

    Its descriptor only says that something has changed since the socket was last used, also by sending: the socket
    itself must be asked then (zmq_getsockopt(3): ZMQ_FD, ZMQ_EVENTS).
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[list[zmq.Frame]], None] | None = None
        self._loop.add_reader(self._descriptor, self._look)

    async def receive(self) -> list[zmq.Frame]:
        while not self._is_readable():  # to find out by receiving costs an exception for every message
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._received()

    async def listen(self, take: Callable[[list[zmq.Frame]], None]) -> None:
        """Give every message to `take`, a turn of the loop earlier than to a task that receives. Ends with what `take`
        raises."""
        self._take, self._waiter = take, self._loop.create_future()
        self._look()
        try:
            await self._waiter
        finally:
            self._take = None

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Never blocks: nothing bounds how much waits for a peer. What cannot be sent is dropped."""
        if self._socket.closed:
            return
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            log.debug("message not sent: %s", error)
        if self._take is None:
            self._look()
        elif self._is_readable():
            self._loop.call_soon(self._look)  # not now: it may be `take` that sends

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)

    def _look(self) -> None:
        if self._socket.closed:
            return
        # Asked in any case, or the descriptor would go on to say so.
        while self._is_readable() and self._waiter is not None and not self._waiter.done():
            if self._take is None:
                self._waiter.set_result(None)
                return
            try:
                self._take(self._received())
            except Exception as error:
                self._waiter.set_exception(error)

    def _received(self) -> list[zmq.Frame]:
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:  # ZMQ gives away messages that are whole
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        return frames

    def _is_readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)


class RouterSocket(Generic[M]):
    """Bound side; at most one per context, whose judge of secrets it is. Needs a running loop.

    A frame that is no message of `union` is reported by `receive` as WireError.
    """

    def __init__(self, context: Context, union: Any, *, secret: str, path: Path | None = None, host: str = "") -> None:
        self._gate = AsyncioAuthenticator(context, log=logging.getLogger("zmq.auth"))
        self._gate.start()
        self._gate.configure_plain(domain=_DOMAIN, passwords={_USER: secret})
        self._socket = _plain_socket(context, zmq.ROUTER)
        self._socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        # A peer that is gone must be an error here, not a silent drop; the windows of works and hits bound the queue.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._codec: Codec[M] = Codec(union)
        if path is not None:
            self._socket.bind(f"ipc://{path}")
        else:
            if ":" in host:
                self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._mailbox = _Mailbox(self._socket)

    async def receive(self) -> tuple[bytes, M, list[memoryview]]:
        """A peer's name, its message, and the frame that came with it, if one did."""
        peer, header, *pieces = await self._mailbox.receive()
        return peer.bytes, self._codec.decode(header.buffer), _joined(pieces)

    def send(self, peer: bytes, message: Message, frames: Frames = ()) -> None:
        """Never blocks. A message to a peer that has gone is dropped: whoever counts on it watches the peer."""
        self._mailbox.send([peer, self._codec.encode(message), *frames])

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._mailbox.close()
            self._socket.close(linger=0)
            self._gate.stop()


class DealerSocket(Generic[M]):
    """Connecting side, known to the ROUTER as `name`."""

    def __init__(self, context: Context, union: Any, *, secret: str, name: bytes, address: str) -> None:
        self._socket = _plain_socket(context, zmq.DEALER)
        self._socket.setsockopt_string(zmq.PLAIN_USERNAME, _USER)
        self._socket.setsockopt_string(zmq.PLAIN_PASSWORD, secret)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if address.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._codec: Codec[M] = Codec(union)
        self._socket.connect(address)
        self._mailbox = _Mailbox(self._socket)

    async def receive(self) -> tuple[M, list[memoryview]]:
        return self._read(await self._mailbox.receive())

    async def listen(self, take: Callable[[M, list[memoryview]], None]) -> None:
        """Give every message to `take`, at once; what is no message is logged and dropped. Ends with what `take`
        raises."""

        def read(received: list[zmq.Frame]) -> None:
            try:
                message, frames = self._read(received)
            except WireError as error:
                log.warning("dropped a frame: %s", error)
            else:
                take(message, frames)

        await self._mailbox.listen(read)

    def _read(self, received: list[zmq.Frame]) -> tuple[M, list[memoryview]]:
        header, *frames = received
        return self._codec.decode(header.buffer), [frame.buffer for frame in frames]

    def send(self, message: Message, frames: Frames = ()) -> None:
        """At most one frame: the ROUTER puts pieces together and cannot tell whose they are."""
        assert len(frames) <= 1
        self._mailbox.send([self._codec.encode(message), *(piece for frame in frames for piece in _pieces(frame))])

    def close(self, linger_ms: int = 0) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._mailbox.close()
            self._socket.close(linger=linger_ms)


def _plain_socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    """One for a `_Mailbox`, in a context whose others are asyncio's: the judge of secrets has these."""
    made: Any = context.socket(kind, socket_class=cast(Any, zmq.Socket))
    return cast("zmq.Socket[bytes]", made)


def _pieces(frame: bytes | memoryview) -> Frames:
    view = memoryview(frame)
    if view.nbytes <= PIECE_BYTES:
        return [frame]
    view = view.cast("B")
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]


def _joined(pieces: Sequence[zmq.Frame]) -> list[memoryview]:
    if len(pieces) > 1:
        return [memoryview(b"".join(piece.buffer for piece in pieces))]
    return [piece.buffer for piece in pieces]
