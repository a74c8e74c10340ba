"""HTTP with nothing around it: a generator of load that shares a machine with its server must cost little itself."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any


def http_request(path: str, body: bytes, kind: str, method: str = "POST", *, close: bool = False) -> bytes:
    """Whole, as it goes over the wire; `close` asks the server to end the connection after its reply."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + (b"Connection: close\r\n\r\n" if close else b"\r\n") + body


def json_request(path: str, fields: dict[str, Any], *, close: bool = False) -> bytes:
    return http_request(path, json.dumps(fields).encode(), "application/json", close=close)


async def ask(port: int, request: bytes) -> str:
    """The status of the reply to a `close` request on a connection of its own, or the name of what went wrong."""
    # The kernel remembers an ended connection for a minute; from one address, it would soon look long for a free port.
    local = (f"127.0.0.{random.randrange(2, 255)}", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
    except OSError as error:
        return type(error).__name__
    try:
        writer.write(request)
        reply = await reader.read()
        return reply.split(b" ", 2)[1].decode() if reply else "no reply"
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()
