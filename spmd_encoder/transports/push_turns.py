"""How connections share the event loop that writes them, a slice each in turn, and how they end."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Protocol

TURN_BYTES = 4 * 2**20
"""What all connections together write while nothing else runs: about a millisecond."""
SLICE_BYTES = 256 * 2**10
"""What one of them writes before the next one has its turn."""
FAREWELL_S = 10.0
_MOST_HEARD_BYTES = 64 * 2**10


class Writer(Protocol):
    def write(self, max_bytes: int) -> int:
        """Write what can be written now, up to so much; how many bytes it was."""
        ...

    def stays_in_line(self) -> bool:
        """Asked after that: whether there is more, and the connection takes it."""
        ...


class Turns:
    """Round robin among all connections of a transport that have something to write."""

    def __init__(self) -> None:
        self._queue: deque[Writer] = deque()
        self._left = TURN_BYTES
        self._is_due = False

    def ask(self, writer: Writer) -> None:
        """Let it write, now if there is nothing before it. Only where it is not in line already."""
        if not self._queue and self._left > 0:
            self._let(writer)
        else:
            self._queue.append(writer)
        if (self._queue or self._left < TURN_BYTES) and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _let(self, writer: Writer) -> None:
        self._left -= writer.write(min(SLICE_BYTES, self._left))
        if writer.stays_in_line():
            self._queue.append(writer)

    def _next_turn(self) -> None:
        self._is_due = False
        self._left = TURN_BYTES
        while self._queue and self._left > 0:
            self._let(self._queue.popleft())
        if self._left < TURN_BYTES:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)


class Farewells:
    """Connections that are written to no more. What the kernel still has of them goes its way: the descriptor is kept
    until the other side has closed, or for `FAREWELL_S`, since with a closed one the kernel would answer whatever comes
    by throwing the rest away."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._timers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._heard: dict[socket.socket, int] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # the other side has gone
            sock.close()
            return
        if len(self._timers) >= self._most:
            sock.close()
            return
        loop = asyncio.get_running_loop()
        self._timers[sock] = loop.call_later(FAREWELL_S, self._end, sock)
        loop.add_reader(sock.fileno(), self._hear, sock)

    async def close(self, timeout_s: float) -> None:
        """Give them so much time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self._timers and loop.time() < end:
            await asyncio.sleep(0.01)
        for sock in list(self._timers):
            self._end(sock)

    def _hear(self, sock: socket.socket) -> None:
        try:
            heard = len(sock.recv(_MOST_HEARD_BYTES))
        except BlockingIOError:
            return
        except OSError:
            heard = 0
        self._heard[sock] = self._heard.get(sock, 0) + heard
        if not heard or self._heard[sock] >= _MOST_HEARD_BYTES:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        self._timers.pop(sock).cancel()
        self._heard.pop(sock, None)
        asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()
