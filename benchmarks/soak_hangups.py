"""Clients that go away in the middle: over HTTP on a raw socket, at each stage of a request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from enum import Enum

# A close sends RST and not FIN.
_RESET = struct.pack("ii", 1, 0)
_LONGEST_S = 0.03
_PATIENCE_S = 1.0


class Stage(Enum):
    CONNECTED = "nothing is sent"
    HEAD = "half of the headers"
    BODY = "half of the body"
    SENT = "all is sent"
    WAITING = "a moment later"
    REPLY = "the reply has begun"


async def hang_up(port: int, request: bytes, rng: random.Random) -> Stage:
    """Send `request` as far as a random stage goes, then close or reset the connection."""
    stage = rng.choice(list(Stage))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = request.index(b"\r\n\r\n") + 4
    cut = {Stage.CONNECTED: 0, Stage.HEAD: head // 2, Stage.BODY: (head + len(request)) // 2}.get(stage, len(request))
    with contextlib.suppress(ConnectionError):
        writer.write(request[:cut])
        await writer.drain()
        if stage is Stage.WAITING:
            await asyncio.sleep(rng.uniform(0, _LONGEST_S))
        elif stage is Stage.REPLY:
            with contextlib.suppress(TimeoutError):  # some replies wait for another call, which may never be made
                async with asyncio.timeout(_PATIENCE_S):
                    await reader.read(rng.choice((1, 64, 4096)))
        if rng.random() < 0.5:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.close()
        await writer.wait_closed()
    return stage
