"""Length-prefixed messages over a byte stream: keeper and worker (socket pair), keeper and dispatcher.

A frame is a 4-byte big-endian length and that many bytes of msgpack (`wire.codec`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from spmd_encoder.wire.codec import Codec, WireError
from spmd_encoder.wire.messages import Message

M = TypeVar("M")
_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 16 * 2**20
_STEP_BYTES = 64 * 2**20
# What one sendmsg takes: IOV_MAX on Linux is 1024.
_MAX_PARTS = 64
_WHOLE_BYTES = 64 * 2**10
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


class Stream(Generic[M]):
    """One end of a connection in an event loop. Reads messages of `union`, writes any."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, union: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._codec: Codec[M] = Codec(union)

    async def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> M | None:
        """The next message, or None when the peer has gone. Raises WireError for anything that is no message."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return self._codec.decode(await self._reader.readexactly(_checked(length, max_bytes)))
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            return None

    def send(self, message: Message) -> None:
        """Queue a message; a lost peer is noticed by `receive`, never here."""
        if not self._writer.is_closing():
            body = self._codec.encode(message)
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def flush(self, timeout_s: float = 1.0) -> None:
        try:
            await asyncio.wait_for(self._writer.drain(), timeout_s)
        except (ConnectionError, OSError, TimeoutError):
            return

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Hang up at once; `receive` finds the peer gone."""
        self._writer.transport.abort()


class Pipe:
    """The worker's end of its socket pair: usable from any thread, before and without an event loop.

    The kernel holds what was sent, so a message survives its sender's SIGKILL.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._codec: Codec[Any] = Codec(Message)

    def send(self, message: Message) -> None:
        body = self._codec.encode(message)
        left = memoryview(_LENGTH.pack(len(body)) + body)
        with self._lock:
            while left:
                try:
                    left = left[self.sock.send(left) :]
                except BlockingIOError:
                    # Not select.select, which knows no descriptor above 1023.
                    poll = select.poll()
                    poll.register(self.sock, select.POLLOUT)
                    poll.poll(1000.0)
                except OSError:
                    return  # the keeper has gone; its hang-up ends this process

    def receive_blocking(self, union: Any) -> Any:
        """One message, before there is an event loop. Raises ConnectionError when the peer has gone, WireError for
        anything that is no message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return Codec[Any](union).decode(self._exactly(_checked(length)))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.sock.recv(size - len(data))
            if not chunk:
                raise ConnectionError("the peer has gone")
            data += chunk
        return data


def send_with_descriptor(sock: socket.socket, message: Message, descriptor: int | None) -> None:
    """One message, of a few hundred bytes, and a descriptor where it has one; the peer gets a duplicate of that.

    Blocks where the peer takes nothing, or raises BlockingIOError. Raises OSError when it has gone.
    """
    body = Codec[Any](Message).encode(message)
    frame = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(sock, [frame], [] if descriptor is None else [descriptor])
    assert sent == len(frame)  # a stream of this kind takes so small a piece as a whole


def receive_with_descriptor(sock: socket.socket, union: Any) -> tuple[Any, int | None]:
    """What `send_with_descriptor` has sent. Raises ConnectionError when the peer has gone."""
    # The kernel never puts bytes that came with different descriptors into one answer.
    (size,) = _LENGTH.unpack(_exactly_peeked(sock, _LENGTH.size))
    frame, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size + size, 1)
    return Codec[Any](union).decode(frame[_LENGTH.size :]), descriptors[0] if descriptors else None


def _exactly_peeked(sock: socket.socket, size: int) -> bytes:
    head = sock.recv(size, socket.MSG_PEEK | socket.MSG_WAITALL)
    if len(head) < size:
        raise ConnectionError("the peer has gone")
    return head


class FrameSocket(Generic[M]):
    """A blocking socket over which messages with raw frames after them go both ways; for one thread at a time.

    The sizes of the frames stand in the message before them. All methods raise ConnectionError when the peer has gone.
    """

    def __init__(self, sock: socket.socket, union: Any) -> None:
        self._sock = sock
        self._codec: Codec[M] = Codec(union)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: Message, frames: Iterable[bytes | memoryview] = ()) -> None:
        body = self._codec.encode(message)
        parts = [memoryview(part) for part in (_LENGTH.pack(len(body)) + body, *frames)]
        parts = [part.cast("B") for part in parts if part.nbytes]
        try:
            # All at once: each call would cost a change of the GIL, and wake the peer for a few bytes.
            sent = self._sock.sendmsg(parts[:_MAX_PARTS])
            for part in parts:
                if sent < len(part):
                    self._sock.sendall(part[sent:])
                sent = max(0, sent - len(part))
        except OSError as error:
            raise ConnectionError(f"the peer has gone ({error})") from None

    def send_now(self, message: Message) -> None:
        """A message of a few hundred bytes; does not block. A peer that has read so little of what came before that it
        finds no room counts as gone."""
        body = self._codec.encode(message)
        frame = _LENGTH.pack(len(body)) + body
        try:
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
        except OSError as error:
            raise ConnectionError(f"the peer has gone ({error})") from None
        if sent < len(frame):
            raise ConnectionError("the peer does not read")

    def wait(self, timeout_s: float) -> bool:
        """Whether something comes within that time, be it the peer's end."""
        return bool(self._poll.poll(1000 * timeout_s))

    def receive(self) -> M:
        """The next message. Raises WireError for anything that is no message."""
        (length,) = _LENGTH.unpack(self.receive_frame(_LENGTH.size))
        return self._codec.decode(self.receive_frame(_checked(length)))

    def receive_whole(self) -> M | None:
        """The next message, if all of it is there, and None if not; does not block. Raises as `receive`."""
        try:
            head = self._sock.recv(_WHOLE_BYTES, _LOOK)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionError(f"the peer has gone ({error})") from None
        if not head:
            raise ConnectionError("the peer has gone")
        if len(head) < _LENGTH.size or len(head) < (end := _LENGTH.size + _LENGTH.unpack_from(head)[0]):
            return None
        self._sock.recv(end)  # it takes away what was looked at
        return self._codec.decode(memoryview(head)[_LENGTH.size : end])

    def receive_frame(self, num_bytes: int) -> bytearray:
        """Takes memory as bytes come, whatever was promised. Raises MemoryError after all of them have come, so that
        the next message is where it should be."""
        done = 0
        try:
            data = bytearray(min(num_bytes, _STEP_BYTES))
            while done < num_bytes:
                if done == len(data):
                    data.extend(bytes(min(num_bytes - done, _STEP_BYTES)))
                with memoryview(data) as view:
                    done += self._receive_into(view[done:])
            return data
        except MemoryError:
            data = bytearray(min(num_bytes, _WHOLE_BYTES))
            while done < num_bytes:
                with memoryview(data) as view:
                    done += self._receive_into(view[: num_bytes - done])
            raise

    def _receive_into(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view)
        except OSError as error:
            raise ConnectionError(f"the peer has gone ({error})") from None
        if not count:
            raise ConnectionError("the peer has gone")
        return count


def _checked(length: int, limit: int = MAX_FRAME_BYTES) -> int:
    if length > limit:
        raise WireError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


async def connect(address: str, union: Any) -> Stream[Any]:
    """`unix:<path>` or `tcp:<host>:<port>`."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(rest)
    else:
        host, _, port = rest.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    return Stream(reader, writer, union)


async def over_socket(sock: socket.socket, union: Any) -> Stream[Any]:
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    return Stream(reader, writer, union)


class Listener:
    """Accepts stream connections at a unix path or at an ephemeral TCP port of `host`."""

    def __init__(self, server: asyncio.Server, address: str) -> None:
        self._server = server
        self.address = address

    @classmethod
    async def open(cls, on_connect: Any, *, path: Path | None = None, host: str = "") -> Listener:
        if path is not None:
            return cls(await asyncio.start_unix_server(on_connect, path=str(path)), f"unix:{path}")
        server = await asyncio.start_server(on_connect, host=host, port=0)
        port = server.sockets[0].getsockname()[1]
        return cls(server, f"tcp:{host}:{port}")

    def close(self) -> None:
        self._server.close()
