"""A real HTTP front end over a `FakeService` in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spmd_encoder.config import Config
from spmd_encoder.frontends.http.server import HttpFrontEnd
from tests.harness.fake_service import FakeService


@dataclass(frozen=True)
class FakeServer:
    url: str
    port: int
    service: FakeService


@contextmanager
def fake_server(service: FakeService | None = None, config: Config | None = None) -> Iterator[FakeServer]:
    """A server on a free port of loopback, ended with the context."""
    service = service or FakeService()
    sock = socket.create_server(("127.0.0.1", 0))
    # asyncio does so only where a socket names its protocol; connections inherit it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = sock.getsockname()[1]
    loop = asyncio.new_event_loop()
    front_end = HttpFrontEnd(service, config or Config(), sock)
    thread = threading.Thread(target=loop.run_until_complete, args=(front_end.serve(),), name="fake-server")
    thread.start()
    try:
        yield FakeServer(f"http://127.0.0.1:{port}", port, service)
    finally:
        loop.call_soon_threadsafe(front_end.stop, 1.0)
        thread.join(10)
        loop.close()
