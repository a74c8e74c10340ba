"""Slow and rude clients on a real socket; and the raw client that `test_http_server` uses too."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import psutil
import pytest

from spmd_encoder.config import Config
from spmd_encoder.frontends.http.body import Timeouts
from spmd_encoder.frontends.http.server import HttpFrontEnd
from tests.harness.fake_service import FakeService, picture, size_embedding

pytestmark = pytest.mark.timeout(30)

CONFIG = replace(Config(), server=replace(Config().server, max_body_bytes=64 * 2**20))
QUICK = Timeouts(header_s=0.3, body_idle_s=0.3, body_total_s=0.8)
GOOD = json.dumps({"items": [{"image": picture(5)}]}).encode()


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        "POST /v1/encode HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class Wire:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(int(head[0].split()[1]), headers, body)

    async def is_closed(self, within_s: float = 3.0) -> bool:
        async with asyncio.timeout(within_s):
            return await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Served:
    service: FakeService
    front_end: HttpFrontEnd
    serving: asyncio.Task[None]
    address: tuple[str, int]

    async def connect(self) -> Wire:
        return Wire(*await asyncio.open_connection(*self.address))


@asynccontextmanager
async def serve_fake(timeouts: Timeouts = QUICK, config: Config = CONFIG) -> AsyncIterator[Served]:
    sock = socket.create_server(("127.0.0.1", 0))
    service = FakeService()
    front_end = HttpFrontEnd(service, config, sock, timeouts=timeouts)
    served = Served(service, front_end, asyncio.create_task(front_end.serve()), sock.getsockname())
    yield served
    service.gate.set()
    front_end.stop(0.5)
    await asyncio.wait_for(served.serving, 30)
    assert sock.fileno() == -1
    assert service.reserved == 0


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake() as served:
        yield served


async def test_keep_alive_and_pipelining(served: Served) -> None:
    wire = await served.connect()
    for _ in range(3):
        wire.send(post(GOOD))
        assert (await wire.reply()).status == 200
    wire.send(post(GOOD) + post(b"{") + post(GOOD))
    assert [(await wire.reply()).status for _ in range(3)] == [200, 400, 200]
    await asyncio.sleep(0.5)  # longer than the headers' time: an idle connection is no slow sender
    wire.send(post(GOOD))
    assert (await wire.reply()).status == 200


async def test_a_reply_waits_for_no_acknowledgement(served: Served) -> None:
    """Whatever socket it was given: 40 ms for each reply on Linux."""
    wire = await served.connect()
    wire.send(post(GOOD))
    assert (await wire.reply()).status == 200
    assert nodelay_of_accepted(served.address) == [1]


def nodelay_of_accepted(address: tuple[str, int]) -> list[int]:
    """Of the connections that this process has accepted at `address`."""
    connections = [c for c in psutil.Process().net_connections("tcp4") if c.laddr == address and c.raddr]
    values = []
    for connection in connections:
        with socket.socket(fileno=os.dup(connection.fd)) as sock:
            values.append(int(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    return values


async def test_slow_headers(served: Served) -> None:
    for start in (b"", b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\n"):
        wire = await served.connect()
        wire.send(start)
        reply = await wire.reply()
        assert (reply.status, reply.code) == (408, "REQUEST_TIMEOUT")
        assert reply.headers["x-spmd-replica"] == "none"
        assert await wire.is_closed()


async def test_slow_body(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(b"{", length=1000))
    reply = await wire.reply()
    assert (reply.status, reply.code) == (408, "REQUEST_TIMEOUT")
    assert await wire.is_closed()
    assert served.service.reserved == 0


async def test_body_that_drips_too_long(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(b"{", length=1000))
    answer = asyncio.create_task(wire.reply())
    for _ in range(30):
        if answer.done():
            break
        wire.send(b" ")
        await asyncio.sleep(0.1)
    assert (await answer).status == 408
    assert b"within 0.8 s" in answer.result().body


async def test_headers_without_end(served: Served) -> None:
    wire = await served.connect()
    wire.send(b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 100_000)
    assert (await wire.reply()).status == 431
    wire = await served.connect()
    wire.send(b"GET / HTTP/1.1\r\n" + b"X-Many: b\r\n" * 10_000)
    assert (await wire.reply()).status == 431


async def test_not_http(served: Served) -> None:
    wire = await served.connect()
    wire.send(b"\x16\x03\x01 hello\r\n\r\n")
    reply = await wire.reply()
    assert (reply.status, reply.code) == (400, "INVALID_REQUEST")
    assert await wire.is_closed()


async def test_refused_while_still_sending(served: Served) -> None:
    """The reply to a body above the limit arrives although the client goes on sending."""
    wire = await served.connect()
    wire.send(post(b"", length=65 * 2**20))
    reply = await wire.reply()
    assert (reply.status, reply.code) == (413, "TOO_LARGE")
    for _ in range(5):
        wire.send(bytes(2**16))
        await wire.writer.drain()
    assert await wire.is_closed(within_s=4)


async def test_a_body_of_unknown_length_is_bounded() -> None:
    async with serve_fake(Timeouts()) as served:
        chunked = await served.connect()
        chunked.send(b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(65):
            chunked.send(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        assert (await chunked.reply()).code == "TOO_LARGE"
        chunked.close()


async def test_a_client_that_does_not_take_its_reply_is_cut_off() -> None:
    """And what was held for it is free again."""
    async with serve_fake(Timeouts(reply_idle_s=0.3)) as served:
        served.service.answer = lambda item: replace(size_embedding(item), shape=(2**22,), data=bytes(2**24))
        wire = await served.connect()
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        wire.send(post(GOOD))
        await served.service.arrived.wait()
        async with asyncio.timeout(10):
            while served.service.reserved:
                await asyncio.sleep(0.01)
        wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.IncompleteReadError):
            await wire.reply()


async def test_a_client_that_takes_its_reply_slowly_gets_all_of_it() -> None:
    async with serve_fake(Timeouts(reply_idle_s=0.5)) as served:
        served.service.answer = lambda item: replace(size_embedding(item), shape=(2**22,), data=bytes(2**24))
        wire = await served.connect()
        wire.send(post(GOOD))
        head = await wire.reader.readuntil(b"\r\n\r\n")
        left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while left:
            left -= len(await wire.reader.read(2**19))
            await asyncio.sleep(0.01)


async def test_a_refused_request_whose_body_ends_keeps_its_connection(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(b"", "Content-Type: text/plain", length=100))
    assert (await wire.reply()).status == 415
    wire.send(b" " * 100 + post(GOOD))
    assert (await wire.reply()).status == 200
    await asyncio.sleep(2.3)
    wire.send(post(GOOD))
    assert (await wire.reply()).status == 200


async def test_expect_100_continue(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(b"", "Expect: 100-continue", length=len(GOOD)))
    assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    wire.send(GOOD)
    assert (await wire.reply()).status == 200
