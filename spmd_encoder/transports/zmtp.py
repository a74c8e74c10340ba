"""What a PUSH socket says and hears over TCP: ZMTP 3.1 (RFC 37) with the NULL mechanism. Pure, no sockets.

libzmq can do this too, and hides a lost receiver by design, copies nothing into its own thread without telling when it
is done, and takes four descriptors and a dozen changes of threads for a socket that is used once, which is how SGLang's
receivers want it: each request has a port of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_BODY_BYTES = 4096
"""A PULL socket says nothing but short commands. Without a limit, whoever is connected to could fill the memory."""
_MECHANISM = slice(12, 32)

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"NULL".ljust(20, b"\0") + bytes(32)


class NotAPullerError(Exception):
    """The peer is no PULL socket that can be pushed to; the message says why, in our own words only."""


def command(name: bytes, data: bytes = b"") -> bytes:
    """One frame. Raises ValueError above 255 bytes, which none of ours has."""
    return bytes([_COMMAND, 1 + len(name) + len(data), len(name)]) + name + data


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


HELLO: Final = GREETING + command(b"READY", _property(b"Socket-Type", b"PUSH") + _property(b"Identity", b""))
"""All that this side says in a handshake; the peer's answer changes nothing of it."""


def message(frames: Sequence[bytes | memoryview]) -> list[memoryview]:
    """What one message of these frames is on the wire, as pieces of which the frames themselves are not copied."""
    pieces: list[memoryview] = []
    for place, frame in enumerate(frames, 1):
        view = memoryview(frame).cast("B")
        flags = _MORE if place < len(frames) else 0
        short = len(view) < 256
        head = bytes([flags, len(view)]) if short else bytes([flags | _LONG]) + len(view).to_bytes(8, "big")
        pieces.append(memoryview(head))
        if view:
            pieces.append(view)
    return pieces


class _Expects(enum.Enum):
    GREETING = enum.auto()
    READY = enum.auto()
    COMMANDS = enum.auto()


class PullPeer:
    """What the other side has said so far: fed with bytes as they come, in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._expects = _Expects.GREETING
        self._pong: bytes | None = None

    @property
    def is_ready(self) -> bool:
        """Whether messages may be sent."""
        return self._expects is _Expects.COMMANDS

    @property
    def owes_pong(self) -> bool:
        return self._pong is not None

    def take_pong(self) -> bytes | None:
        """The answer that the last PING still wants, once."""
        pong, self._pong = self._pong, None
        return pong

    def feed(self, data: bytes) -> None:
        """Holds at most some 4 KiB of what is not whole yet. Raises NotAPullerError; nothing may be fed after that."""
        self._data += data
        if self._expects is _Expects.GREETING:
            _check_beginning(self._data)
            if len(self._data) < _GREETING_BYTES:
                return
            _check_greeting(bytes(self._data[:_GREETING_BYTES]))
            del self._data[:_GREETING_BYTES]
            self._expects = _Expects.READY
        while (body := self._next_command()) is not None:
            self._heard(body)

    def _next_command(self) -> bytes | None:
        """Its body, or None while it is not whole."""
        if len(self._data) < 2:
            return None
        flags = self._data[0]
        if flags & ~_LONG != _COMMAND:
            raise NotAPullerError("it sends messages, which a PULL socket does not")
        start = 9 if flags & _LONG else 2
        if len(self._data) < start:
            return None
        end = start + int.from_bytes(self._data[1:start], "big")
        if end - start > _MAX_BODY_BYTES:
            raise NotAPullerError("it sends a command of more than 4096 bytes")
        if len(self._data) < end:
            return None
        body = bytes(self._data[start:end])
        del self._data[:end]
        return body

    def _heard(self, body: bytes) -> None:
        size = body[0] if body else 0
        name, data = body[1 : 1 + size], body[1 + size :]
        if self._expects is _Expects.READY:
            _check_ready(name, data)
            self._expects = _Expects.COMMANDS
        elif name == b"PING" and len(data) <= 2 + 16:
            self._pong = command(b"PONG", data[2:])  # two bytes of a time to live, a context to be given back
        elif name != b"PONG":
            raise NotAPullerError("it sends a command that a PULL socket does not")


def _check_beginning(data: bytearray) -> None:
    """As soon as it can be told, since a peer that speaks something else may never send 64 bytes."""
    if bytes(data[:1]) not in (b"", b"\xff") or (len(data) > 9 and not data[9] & 1):
        raise NotAPullerError("it does not speak ZMQ")
    if len(data) > 10 and data[10] < 3:
        raise NotAPullerError("it speaks a ZMQ that is older than 4.0")


def _check_greeting(greeting: bytes) -> None:
    mechanism = greeting[_MECHANISM].rstrip(b"\0")
    if mechanism != b"NULL":
        raise NotAPullerError("its ZMQ wants a security mechanism, and only sockets without one can be pushed to")


def _check_ready(name: bytes, data: bytes) -> None:
    if name == b"ERROR":
        raise NotAPullerError("its ZMQ refuses the connection")
    if name != b"READY":
        raise NotAPullerError("it does not speak ZMQ")
    kind = _properties(data).get(b"socket-type")
    if kind != b"PULL":
        raise NotAPullerError("its ZMQ socket is no PULL socket")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """By their names in lower case (they are equal in any)."""
    found: dict[bytes, bytes] = {}
    while data:
        start = 1 + data[0] + 4
        end = start + int.from_bytes(data[start - 4 : start], "big")
        if start > len(data) or end > len(data):
            raise NotAPullerError("it does not speak ZMQ")
        found[data[1 : start - 4].lower()] = data[start:end]
        data = data[end:]
    return found
