"""One endpoint of the push transport: its PUSH socket, and what ZMQ's monitor tells of the connection."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from spmd_encoder.transports.base import Buffer, PushEndpoint

_CONNECT_MS = 10_000
# A PUSH socket gets nothing but short commands. Without a limit, whoever is connected to could fill the memory.
_MAX_RECEIVED_BYTES = 4096
_KEEPALIVE = ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 10), (zmq.TCP_KEEPALIVE_INTVL, 5))
_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _BROKEN


class PeerLostError(Exception):
    """No more can reach this endpoint over this connection; the message says why."""


class PushPeer:
    """A connection that is used until it is lost, and not again after that.

    `pending` and `pending_bytes` count parcels that were given to `send` and still hold memory.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: PushEndpoint) -> None:
        loop = asyncio.get_running_loop()
        self.endpoint = endpoint
        self.pending = 0
        self.pending_bytes = 0
        self._callers = 0
        self.last_used = loop.time()
        self._loop = loop
        self._ready: asyncio.Future[None] = loop.create_future()
        self._lost: asyncio.Future[str] = loop.create_future()
        self._socket = context.socket(zmq.PUSH)
        self._monitor = self._open()
        # Its descriptor tells of what comes after a reading that found nothing more.
        self._read_monitor()
        self._connecting = loop.create_task(self._connect())

    @property
    def is_idle(self) -> bool:
        """Whether nobody sends, and nothing is on its way."""
        return not self.pending and not self._callers

    @property
    def is_lost(self) -> bool:
        self._read_monitor()
        return self._lost.done()

    async def send(self, frames: Sequence[Buffer], num_bytes: int) -> None:
        """Return when ZMQ has written all frames to the connection. Raises PeerLostError."""
        self._callers += 1
        try:
            await self._send(frames, num_bytes)
        finally:
            self._callers -= 1

    async def _send(self, frames: Sequence[Buffer], num_bytes: int) -> None:
        self.pending += 1
        self.pending_bytes += num_bytes
        try:
            await self._or_lost(self._ready)
            self._check()
            gone = self._hand_over(frames)
        except BaseException:
            self._released(num_bytes, None)
            raise
        # Also where the caller is cancelled: the bytes are held until ZMQ lets go of them.
        gone.add_done_callback(partial(self._released, num_bytes))
        await self._or_lost(gone)
        # ZMQ lets go of frames that it throws away, too. It reports the lost connection before that.
        self._check()

    def close(self, why: str, *, linger_s: float = 0.0) -> None:
        """Callers of `send` get PeerLostError. What was written already is not taken back. May be called again."""
        if self._socket.closed:
            return
        self._lose(why)
        self._connecting.cancel()
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=round(linger_s * 1000))

    # -- the connection

    def _open(self) -> zmq.Socket[bytes]:
        push = self._socket
        push.setsockopt(zmq.SNDHWM, 0)  # the transport bounds bytes; a number of messages says nothing
        push.setsockopt(zmq.IMMEDIATE, 1)
        push.setsockopt(zmq.RECONNECT_IVL, -1)
        push.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        push.setsockopt(zmq.HANDSHAKE_IVL, _CONNECT_MS)
        push.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        for option, value in _KEEPALIVE:
            push.setsockopt(option, value)
        monitor = push.get_monitor_socket(_WATCHED)
        self._loop.add_reader(monitor.fileno(), self._read_monitor)
        return monitor

    async def _connect(self) -> None:
        try:
            address = await _resolve(self.endpoint)
        except OSError as error:
            self._lose(f"its name cannot be resolved: {error.strerror or error}")
            return
        self._socket.setsockopt(zmq.IPV6, int(":" in address.host))
        self._socket.connect(f"tcp://{address}")

    def _read_monitor(self) -> None:
        """All events up to now; none may be left unread, since the descriptor would not tell of them again."""
        with suppress(zmq.ZMQError):  # nothing more, or closed
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    if not self._ready.done():
                        self._ready.set_result(None)
                elif event & _BROKEN:
                    self._lose("it does not speak ZMQ")
                else:
                    self._lose("it closed the connection" if self._ready.done() else "it cannot be reached")

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)

    async def _or_lost(self, future: asyncio.Future[Any]) -> None:
        watched: set[asyncio.Future[Any]] = {future, self._lost}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)

    def _check(self) -> None:
        if self.is_lost:
            raise PeerLostError(self._lost.result())

    # -- messages

    def _hand_over(self, frames: Sequence[Buffer]) -> asyncio.Future[None]:
        """Queue a message without copying it. The future is done when ZMQ holds its last frame no more."""
        gone: asyncio.Future[None] = self._loop.create_future()
        # Makes ZMQ take note of the connection that its own thread has made.
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            raise PeerLostError("it closed the connection")
        for place, data in enumerate(frames, 1):
            view = memoryview(data)
            if place == len(frames):
                # pyzmq keeps this very view until ZMQ's thread has freed the frame.
                weakref.finalize(view, _tell, self._loop, gone).atexit = False
            flags = zmq.NOBLOCK if place == len(frames) else zmq.NOBLOCK | zmq.SNDMORE
            self._socket.send(zmq.Frame(view, copy=False), flags, copy=False)
        return gone

    def _released(self, num_bytes: int, _: object) -> None:
        self.pending -= 1
        self.pending_bytes -= num_bytes
        self.last_used = self._loop.time()


def _tell(loop: asyncio.AbstractEventLoop, gone: asyncio.Future[None]) -> None:
    """Called in pyzmq's thread."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(_finish, gone)


def _finish(gone: asyncio.Future[None]) -> None:
    if not gone.done():
        gone.set_result(None)


async def _resolve(endpoint: PushEndpoint) -> PushEndpoint:
    """The endpoint with an address for its name. ZMQ's only I/O thread would stand still during a lookup."""
    try:
        ipaddress.ip_address(endpoint.host.partition("%")[0])
        return endpoint
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        return PushEndpoint(str(found[0][4][0]), endpoint.port)
