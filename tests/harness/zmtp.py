"""ZMTP 3.0 by hand (RFC 23), for peers that ZMQ itself would never be: what they send is not what it says."""

from __future__ import annotations

import socket
import struct

COMMAND, MORE = 4, 1
_LONG = 2


def greeting(mechanism: bytes = b"PLAIN", *, minor: int = 0, as_server: bool = False) -> bytes:
    """The 64 bytes that both sides begin with."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def frame(body: bytes, flags: int = 0) -> bytes:
    return head(len(body), flags) + body


def head(num_bytes: int, flags: int = 0) -> bytes:
    """What comes before a frame's body of so many bytes."""
    if num_bytes < 256:
        return bytes([flags, num_bytes])
    return bytes([flags | _LONG]) + struct.pack(">Q", num_bytes)


def plain_hello(user: bytes, password: bytes) -> bytes:
    """The command that shows a secret (RFC 24)."""
    return frame(b"\x05HELLO" + bytes([len(user)]) + user + bytes([len(password)]) + password, COMMAND)


def ready(name: bytes, socket_type: bytes) -> bytes:
    """The command that ends a handshake: READY, or INITIATE after PLAIN's."""
    kind = b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return frame(bytes([len(name)]) + name + kind, COMMAND)


def flood(sock: socket.socket, num_bytes: int, piece: bytes = bytes(2**16)) -> int:
    """Send so many bytes, or as many as the peer takes before it hangs up; how many went."""
    sent = 0
    try:
        while sent < num_bytes:
            sent += sock.send(piece[sent % len(piece) :][: num_bytes - sent])
    except OSError:
        pass
    return sent
