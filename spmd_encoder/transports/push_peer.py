"""One endpoint of the push transport: its connection, and what waits to be written to it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_encoder.transports import zmtp
from spmd_encoder.transports.base import Buffer, PushEndpoint

_CONNECT_S = 10.0
_READ_BYTES = 4096
_STEP_BYTES = 4 * 2**20
"""The event loop stands still for no more than the copying of so much."""
# What one sendmsg takes: IOV_MAX on Linux is 1024.
_MAX_PIECES = 64
_RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: what the peer has not taken yet is thrown away."""
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
)


class PeerLostError(Exception):
    """No more can reach this endpoint over this connection; the message says why."""


@dataclass(eq=False)
class _Message:
    """`pieces` are what is not written yet. `gone` is done when there are none. A parcel counts in `pending`."""

    pieces: deque[memoryview]
    gone: asyncio.Future[None]
    num_bytes: int = 0
    is_parcel: bool = True
    has_begun: bool = False

    def next_step(self) -> list[memoryview]:
        step: list[memoryview] = []
        room = _STEP_BYTES
        for piece in itertools.islice(self.pieces, _MAX_PIECES):
            if room <= 0:
                break
            step.append(piece[:room])
            room -= len(piece)
        return step

    def written(self, num_bytes: int) -> None:
        self.has_begun = True
        while num_bytes:
            first = self.pieces.popleft()
            if num_bytes < len(first):
                self.pieces.appendleft(first[num_bytes:])
                return
            num_bytes -= len(first)


@dataclass(eq=False)
class PushPeer:
    """A connection that is used until it is lost, and not again after that. Belongs to the running event loop.

    `on_lost` is called once, when it is lost or closed. `pending` and `pending_bytes` count parcels that were given to
    `send` and still hold memory.
    """

    endpoint: PushEndpoint
    on_lost: Callable[[PushPeer], None]
    pending: int = 0
    pending_bytes: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _waiting: deque[_Message] = field(default_factory=deque)
    _peer: zmtp.PullPeer = field(default_factory=zmtp.PullPeer)
    _socket: socket.socket | None = None
    _is_writing: bool = False
    _lost: str | None = None

    def __post_init__(self) -> None:
        self.last_used = self._loop.time()
        self._late = self._loop.call_later(_CONNECT_S, self._too_late)
        self._connecting = self._loop.create_task(self._connect())

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a parcel is still to be written."""
        return not self.pending

    @property
    def is_lost(self) -> bool:
        if self._socket is not None:
            self._read()  # the event loop may not have come to tell yet
        return self._lost is not None

    async def send(self, frames: Sequence[Buffer], num_bytes: int) -> None:
        """Return when all frames are written to the connection; they are not copied before. Raises PeerLostError.

        A caller that is cancelled takes its message back, unless a part of it is written: then it is finished.
        """
        if self.is_lost:
            raise PeerLostError(self._lost)
        sent = _Message(deque(zmtp.message(frames)), self._loop.create_future(), num_bytes)
        del frames
        self._waiting.append(sent)
        self.pending += 1
        self.pending_bytes += num_bytes
        if self._peer.is_ready and not self._is_writing:
            self._write()
        try:
            await sent.gone
        finally:
            if not sent.has_begun and sent in self._waiting:
                self._waiting.remove(sent)
                self._released(sent)

    def close(self, why: str, *, at_once: bool = True) -> None:
        """Callers of `send` get PeerLostError. `at_once` also takes back what the receiver's machine has not taken
        yet; else the kernel goes on with that. May be called again."""
        if self._socket is not None and not at_once:
            self._read()  # what lies there unread would make a reset of this end
        self._lose(why, at_once=at_once)

    # -- the connection

    async def _connect(self) -> None:
        """All that comes after it is done by callbacks."""
        try:
            sock = await _connected(self.endpoint)
        except UnicodeError:
            self._lose("its name cannot be resolved: it is no name of a host")
        except socket.gaierror as error:
            self._lose(f"its name cannot be resolved: {error.strerror or error}")
        except OSError as error:
            self._lose(f"it cannot be reached: {error.strerror or error}")
        else:
            self._socket = sock
            # By its number: asyncio makes a text of what it does not know yet, which asks a socket for its addresses.
            self._loop.add_reader(sock.fileno(), self._read)
            self._read()

    def _too_late(self) -> None:
        self._lose("it cannot be reached" if self._socket is None else "it does not answer as ZMQ does")

    def _read(self) -> None:
        """What has come up to now, or the first part of it: a peer that says much must not keep the loop from others,
        which calls again."""
        if self._socket is None:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
            self._peer.feed(data)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except zmtp.NotAPullerError as fault:
            self._lose(str(fault))
            return
        if not data:
            self._lose("it closed the connection")
        elif self._peer.is_ready:
            self._late.cancel()
            if not self._is_writing:
                self._write()

    def _lose(self, why: str, *, at_once: bool = True) -> None:
        if self._lost is not None:
            return
        self._lost = why
        self._late.cancel()
        self._connecting.cancel()
        if (sock := self._socket) is not None:
            self._socket = None
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            if at_once:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()
        while self._waiting:
            message = self._waiting.popleft()
            self._released(message)
            if not message.gone.done():
                message.gone.set_exception(PeerLostError(why))
                message.gone.exception()  # its caller may have gone
        self.on_lost(self)

    # -- messages

    def _write(self) -> None:
        """A step, or less if the connection takes no more; the event loop calls again when it does."""
        assert self._socket is not None
        room = _STEP_BYTES
        try:
            while room > 0 and (message := self._next_message()) is not None:
                sent = self._socket.sendmsg(message.next_step())
                room -= sent
                message.written(sent)
                if not message.pieces:
                    self._waiting.popleft()
                    self._released(message)
                    if not message.gone.done():
                        message.gone.set_result(None)
        except BlockingIOError:
            pass
        except OSError:
            self._lose("it closed the connection")
            return
        if bool(self._waiting) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket.fileno(), self._write)
            else:
                self._loop.remove_writer(self._socket.fileno())

    def _next_message(self) -> _Message | None:
        """The answer to a PING goes before messages that have not begun, so that it never waits behind another one."""
        if not self._waiting or not self._waiting[0].has_begun:
            pong = self._peer.take_pong()
            if pong is not None:
                future = self._loop.create_future()
                self._waiting.appendleft(_Message(deque([memoryview(pong)]), future, is_parcel=False, has_begun=True))
        return self._waiting[0] if self._waiting else None

    def _released(self, message: _Message) -> None:
        if message.is_parcel:
            self.pending -= 1
            self.pending_bytes -= message.num_bytes
            self.last_used = self._loop.time()


async def _connected(endpoint: PushEndpoint) -> socket.socket:
    """A connection to the first of the endpoint's addresses that takes one, with our half of the handshake sent.

    Raises OSError, of which socket.gaierror where its name is unknown, and UnicodeError where it can be none.
    """
    loop = asyncio.get_running_loop()
    failure = OSError("it has no address")
    for family, kind, protocol, _, address in await _addresses(endpoint):
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            for level, option, value in _OPTIONS:
                sock.setsockopt(level, option, value)
            await loop.sock_connect(sock, address)
            sock.send(zmtp.HELLO)  # it fits into any new connection's buffer
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


async def _addresses(endpoint: PushEndpoint) -> Sequence[tuple[Any, Any, int, str, Any]]:
    """As `getaddrinfo` has them. A number needs no thread for a look-up."""
    try:
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=numeric)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
