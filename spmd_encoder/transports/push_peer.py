"""One endpoint of the push transport: its connection, and what waits to be written to it."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spmd_encoder.transports import zmtp
from spmd_encoder.transports.base import Buffer, PushEndpoint, Run
from spmd_encoder.transports.push_turns import Farewells, Turns

_CONNECT_S = 10.0
_READ_BYTES = 4096
_INLINE_BYTES = 16 * 2**10
"""So small a message is written at once, whoever else has something to write."""
# What one sendmsg takes: IOV_MAX on Linux is 1024.
_MAX_PIECES = 64
# Each byte that a peer says costs the event loop time: a PULL socket says 25 bytes per heartbeat at most.
_MOST_SAID_BYTES = 16 * 2**10
_MOST_SAID_BYTES_PER_S = 4 * 2**10
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
)


_NO_PULL = "it closed the connection in the handshake, as all do but PULL sockets without a security mechanism"


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

    def first(self, max_bytes: int) -> list[memoryview]:
        step: list[memoryview] = []
        room = max_bytes
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

    `on_lost` is called once, when it is lost or closed. `patience_s`: so long a message that has begun goes on after
    its caller has gone. `pending` and `pending_bytes` count parcels that were given to `send` and still hold memory.
    """

    endpoint: PushEndpoint
    turns: Turns
    farewells: Farewells
    on_lost: Callable[[PushPeer], None]
    run_look_ups: Run
    patience_s: float
    pending: int = 0
    pending_bytes: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _waiting: deque[_Message] = field(default_factory=deque)
    _peer: zmtp.PullPeer = field(default_factory=zmtp.PullPeer)
    _socket: socket.socket | None = None
    _is_blocked: bool = False
    """Whether the event loop tells when the connection takes more."""
    _is_in_line: bool = False
    _lost: str | None = None

    def __post_init__(self) -> None:
        now = self._loop.time()
        self.last_used = self._moved_at = self._heard_at = now
        self._seen_unsent_bytes = 0
        self._may_say_bytes = float(_MOST_SAID_BYTES)
        self._late = self._loop.call_later(_CONNECT_S, self._too_late)
        self._connecting = self._loop.create_task(self._connect())

    @property
    def is_idle(self) -> bool:
        """Whether the receiver's machine has all that was sent."""
        return not self.pending and not self._unsent_bytes()

    def still_s(self) -> float:
        """For how long it has taken nothing, as far as those have seen who asked. Says nothing of an idle one."""
        if self.pending and not self._is_blocked:
            return 0.0  # not its fault, or that of a handshake, which has a time of its own
        if (unsent := self._unsent_bytes()) != self._seen_unsent_bytes:
            self._seen_unsent_bytes, self._moved_at = unsent, self._loop.time()
        return self._loop.time() - self._moved_at

    @property
    def is_lost(self) -> bool:
        if self._socket is not None:
            self._read()  # the event loop may not have come to tell yet
        return self._lost is not None

    async def send(self, frames: Sequence[Buffer], num_bytes: int) -> None:
        """Return when all frames are written to the connection; they are not copied before. Raises PeerLostError.

        A caller that is cancelled takes its message back, unless a part of it is written: then it goes on for a while.
        """
        if self.is_lost:
            raise PeerLostError(self._lost)
        sent = _Message(deque(zmtp.message(frames)), self._loop.create_future(), num_bytes)
        del frames
        self._waiting.append(sent)
        self.pending += 1
        self.pending_bytes += num_bytes
        self._write_soon()
        try:
            await sent.gone
        finally:
            if not sent.has_begun and sent in self._waiting:
                self._waiting.remove(sent)
                self._released(sent)
            elif sent.gone.cancelled():
                self._loop.call_later(self.patience_s, self._out_of_patience, sent)

    def give_up(self, why: str) -> None:
        """Close it where a message has begun whose caller has gone: what is behind it would wait for ever."""
        if self._waiting and self._waiting[0].has_begun and self._waiting[0].gone.cancelled():
            self.close(why)

    def _out_of_patience(self, sent: _Message) -> None:
        if self._waiting and self._waiting[0] is sent:
            self.close("it takes nothing")

    def close(self, why: str) -> None:
        """Callers of `send` get PeerLostError: of what they sent the receiver has a part at most, which its ZMQ throws
        away. What was sent before still goes its way. May be called again."""
        self._lose(why, parts_well=True)

    # -- the connection

    async def _connect(self) -> None:
        """All that comes after it is done by callbacks."""
        try:
            sock = await _connected(self.endpoint, self.run_look_ups)
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
            self._check_pace(len(data))
            self._peer.feed(data)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except zmtp.NotAPullerError as fault:
            self._lose(str(fault))
            return
        if not data:
            self._lose("it closed the connection" if self._peer.is_ready else _NO_PULL)
        elif self._peer.is_ready:
            self._late.cancel()
            self._write_soon()

    def _check_pace(self, num_bytes: int) -> None:
        """Raises NotAPullerError where it says so much that others would have to wait for us to listen."""
        now = self._loop.time()
        more = _MOST_SAID_BYTES_PER_S * (now - self._heard_at)
        self._may_say_bytes = min(_MOST_SAID_BYTES, self._may_say_bytes + more) - num_bytes
        self._heard_at = now
        if self._may_say_bytes < 0:
            raise zmtp.NotAPullerError("it says more than a PULL socket does")

    def _lose(self, why: str, *, parts_well: bool = False) -> None:
        """`parts_well`: the receiver is sound as far as is known, and gets what the kernel still has for it."""
        if self._lost is not None:
            return
        self._lost = why
        self._late.cancel()
        self._connecting.cancel()
        if (sock := self._socket) is not None:
            self._socket = None
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            if parts_well:
                self.farewells.add(sock)
            else:
                sock.close()
        while self._waiting:
            message = self._waiting.popleft()
            self._released(message)
            if not message.gone.done():
                message.gone.set_exception(PeerLostError(why))
                message.gone.exception()  # its caller may have gone
        self.on_lost(self)

    def _unsent_bytes(self) -> int:
        """What the kernel holds because the receiver's machine has not acknowledged it (SIOCOUTQ of tcp(7))."""
        if self._socket is None:
            return 0
        (unsent,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        return int(unsent)

    # -- messages

    def _write_soon(self) -> None:
        if (
            self._is_blocked
            or self._is_in_line
            or not (self._peer.is_ready and (self._waiting or self._peer.owes_pong))
        ):
            return
        if len(self._waiting) == 1 and self._waiting[0].num_bytes <= _INLINE_BYTES:
            self.write(2 * _INLINE_BYTES)
            if not self.stays_in_line():  # what describes the rows may be longer than they are
                return
        self._is_in_line = True
        self.turns.ask(self)

    def stays_in_line(self) -> bool:
        """For `Turns`."""
        self._is_in_line = self._socket is not None and not self._is_blocked and bool(self._waiting)
        return self._is_in_line

    def write(self, max_bytes: int) -> int:
        """For `Turns`: up to so much, or what the connection takes; the event loop tells when it takes more."""
        self._is_in_line = False
        room = max_bytes
        try:
            while self._socket is not None and room > 0 and (message := self._next_message()) is not None:
                sent = self._socket.sendmsg(message.first(room))
                room -= sent
                self._moved_at = self._loop.time()
                message.written(sent)
                if not message.pieces:
                    self._waiting.popleft()
                    self._released(message)
                    if not message.gone.done():
                        message.gone.set_result(None)
        except BlockingIOError:
            assert self._socket is not None
            self._is_blocked = True
            self._loop.add_writer(self._socket.fileno(), self._writable)
        except OSError:
            self._lose("it closed the connection")
        return max_bytes - room

    def _writable(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket.fileno())
        self._is_blocked = False
        self._write_soon()

    def _next_message(self) -> _Message | None:
        """The answer to a PING goes before messages that have not begun, so that it never waits behind another one."""
        if not self._waiting or not self._waiting[0].has_begun:
            pong = self._peer.take_pong()
            if pong is not None:
                future = self._loop.create_future()
                self._waiting.appendleft(_Message(deque([memoryview(pong)]), future, is_parcel=False, has_begun=True))
        return self._waiting[0] if self._waiting else None

    def _released(self, message: _Message) -> None:
        message.pieces.clear()  # an error's traceback, or a timer, may hold the message for long
        if message.is_parcel:
            self.pending -= 1
            self.pending_bytes -= message.num_bytes
            self.last_used = self._loop.time()


async def _connected(endpoint: PushEndpoint, run_look_ups: Run) -> socket.socket:
    """A connection to the first of the endpoint's addresses that takes one, with our half of the handshake sent.

    Raises OSError, of which socket.gaierror where its name is unknown, and UnicodeError where it can be none.
    """
    loop = asyncio.get_running_loop()
    failure = OSError("it has no address")
    for family, kind, protocol, _, address in await _addresses(endpoint, run_look_ups):
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


async def _addresses(endpoint: PushEndpoint, run_look_ups: Run) -> Sequence[tuple[Any, Any, int, str, Any]]:
    """As `getaddrinfo` has them. A number needs no thread for a look-up."""
    look_up = partial(socket.getaddrinfo, endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    try:
        return look_up(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await run_look_ups(look_up)
