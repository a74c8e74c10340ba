"""What every front end keeps, whatever its protocol: HTTP, gRPC, and a trivial one that proves the seam.

To add a front end: write a `Caller` for it and name it in CALLERS.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx
import pytest

from spmd_encoder.api.service import EncoderService
from spmd_encoder.api.types import ItemFailure, Modality
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import FrontEnd, ItemLimits, check_count, encode_items, item_name, parse_items
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.registry import FRONT_ENDS, load_front_end
from spmd_encoder.frontends.remote import fetch_items
from spmd_encoder.media.fetch import MediaFetcher
from tests.harness.fake_service import FakeService, failing, picture
from tests.harness.grpc_client import GrpcClient, error_info

pytestmark = pytest.mark.timeout(20)


class LinesFrontEnd:
    """One JSON array of data URIs per line in, one JSON array of outcomes per line out."""

    def __init__(self, service: EncoderService, config: Config, sock: socket.socket) -> None:
        self._service, self._config, self._sock = service, config, sock
        self._fetcher = MediaFetcher(config.media)
        self._pool = ThreadPoolExecutor(1)
        self._stopped = asyncio.Event()
        self._timeout_s: float | None = None
        self._busy: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        server = await asyncio.start_unix_server(self._connected, sock=self._sock, limit=2**24)
        await self._stopped.wait()
        server.close()
        if self._busy:
            await asyncio.wait(self._busy, timeout=self._timeout_s)
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        await self._fetcher.close()
        self._pool.shutdown()

    def stop(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._stopped.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        answer = asyncio.create_task(self._answer(line, writer))
        self._busy.add(answer)
        answer.add_done_callback(self._busy.discard)
        hang_up = asyncio.create_task(reader.read(1))
        await asyncio.wait({answer, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        for task in (answer, hang_up):
            task.cancel()
        writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        reply: Any
        try:
            uris = json.loads(line)
            check_count(len(uris), self._config.server.max_items_per_request)
            limits = ItemLimits.of(self._config)
            sources = parse_items(Modality.IMAGE, uris, limits, item_name)
            parsed = await fetch_items(
                sources, self._fetcher, limits=limits, pool=self._pool, reserve=lambda _: None, name=item_name
            )
            outcomes = await encode_items(self._service, parsed, request_id="line")
            fails = [o.error if isinstance(o, ItemFailure) else None for o in outcomes]
            reply = [[e.code, e.param] if e else ["ok", o.data.hex()] for e, o in zip(fails, outcomes, strict=True)]
        except EncoderError as error:
            reply = {"refused": error.code}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()


@dataclass
class Answer:
    """`refused` where the request failed as a whole, else one ("ok", hex) or (code, param) per item."""

    refused: str | None
    items: list[tuple[str, str | None]]


class Caller(Protocol):
    """A client of one protocol. Cancelling `call` hangs up."""

    def listen(self, folder: Path) -> socket.socket: ...
    def front_end(self, service: EncoderService, config: Config, sock: socket.socket) -> FrontEnd: ...
    async def call(self, uris: list[str]) -> Answer: ...


def _http_outcome(item: dict[str, Any]) -> tuple[str, str | None]:
    if item["status"] == "ok":
        return "ok", base64.b64decode(item["embedding"]).hex()
    return item["error"]["code"], item["error"]["param"]


class HttpCaller:
    def listen(self, folder: Path) -> socket.socket:
        sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/encode"
        return sock

    def front_end(self, service: EncoderService, config: Config, sock: socket.socket) -> FrontEnd:
        return load_front_end("http")(service, config, sock)

    async def call(self, uris: list[str]) -> Answer:
        async with httpx.AsyncClient(timeout=20) as client:
            body = (await client.post(self.url, json={"items": [{"image": uri} for uri in uris]})).json()
        if "data" not in body:
            return Answer(body["error"]["code"], [])
        return Answer(None, [_http_outcome(item) for item in body["data"]])


class GrpcCaller:
    def listen(self, folder: Path) -> socket.socket:
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        return sock

    def front_end(self, service: EncoderService, config: Config, sock: socket.socket) -> FrontEnd:
        return load_front_end("grpc")(service, config, sock)

    async def call(self, uris: list[str]) -> Answer:
        async with GrpcClient(self.port) as client:
            try:
                reply = await client.encode(pb.EncodeRequest(items=[pb.Item(url=uri) for uri in uris]))
            except grpc.aio.AioRpcError as error:
                if "grpc-status-details-bin" not in dict(error.trailing_metadata() or ()):
                    raise ConnectionError(error.details()) from None
                return Answer(error_info(error)[0], [])
        return Answer(None, [_grpc_outcome(result) for result in reply.results])


def _grpc_outcome(result: pb.ItemResult) -> tuple[str, str | None]:
    if result.HasField("embedding"):
        return "ok", result.embedding.data.hex()
    return result.error.code, result.error.param


class LinesCaller:
    def listen(self, folder: Path) -> socket.socket:
        self.path = str(folder / "lines")
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(self.path)
        sock.listen()
        return sock

    def front_end(self, service: EncoderService, config: Config, sock: socket.socket) -> FrontEnd:
        return LinesFrontEnd(service, config, sock)

    async def call(self, uris: list[str]) -> Answer:
        reader, writer = await asyncio.open_unix_connection(self.path)
        try:
            writer.write(json.dumps(uris).encode() + b"\n")
            reply = json.loads(await reader.readline())
        finally:
            writer.close()
        return Answer(reply["refused"], []) if isinstance(reply, dict) else Answer(None, [tuple(o) for o in reply])


CALLERS = {"http": HttpCaller, "grpc": GrpcCaller, "lines": LinesCaller}


@dataclass
class World:
    service: FakeService
    caller: Caller
    front_end: FrontEnd
    serving: asyncio.Task[None]

    async def hanging_call(self) -> asyncio.Task[Answer]:
        """A call that has reached the service, which does not answer."""
        self.service.gate.clear()
        call = asyncio.create_task(self.caller.call([picture(5)]))
        await asyncio.wait_for(self.service.arrived.wait(), 30)
        return call

    async def encoded(self, *widths: int) -> list[tuple[str, str | None]]:
        """What a good answer to pictures of these widths is."""
        return (await self.caller.call([picture(width) for width in widths])).items


@pytest.fixture(params=CALLERS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    service, caller = FakeService(), CALLERS[request.param]()
    sock = caller.listen(tmp_path)
    config = replace(Config(), server=replace(Config().server, max_items_per_request=100))
    front_end = caller.front_end(service, config, sock)
    serving = asyncio.create_task(front_end.serve())
    yield World(service, caller, front_end, serving)
    service.gate.set()
    front_end.stop(1)
    await asyncio.wait_for(serving, 30)


def test_every_registered_front_end_is_tested_here() -> None:
    assert set(FRONT_ENDS) <= set(CALLERS)


async def test_order_is_kept(world: World) -> None:
    widths = [7, 3, 40, 3, 1]
    alone = {width: (await world.encoded(width))[0] for width in set(widths)}
    assert len(set(alone.values())) == 4
    assert await world.encoded(*widths) == [alone[width] for width in widths]


async def test_bad_items_do_not_harm_good_ones(world: World) -> None:
    good = (await world.encoded(5))[0]
    uris = ["data:,", picture(5), "data:;base64,AAAA", "no uri", picture(5), "data:image/png;base64,iVBORw0KGgo="]
    answer = await world.caller.call(uris)
    assert answer.items == [
        ("INVALID_REQUEST", "items[0]"),
        good,
        ("MEDIA_UNSUPPORTED", "items[2]"),
        ("INVALID_REQUEST", "items[3]"),
        good,
        ("MEDIA_CORRUPT", "items[5]"),
    ]
    assert [item.width for item in world.service.seen[-1].items] == [5, 5]


async def test_urls_are_fetched_each_with_its_own_outcome(world: World) -> None:
    """The default configuration lets none of these through, and says so per item."""
    good = (await world.encoded(5))[0]
    uris = ["http://127.0.0.1:9/a.png", picture(5), "FILE:///etc/passwd", "https://[::1]/", "ftp://example.org/a.png"]
    answer = await world.caller.call(uris)
    assert answer.items == [
        ("FETCH_FORBIDDEN", "items[0]"),
        good,
        ("FETCH_FORBIDDEN", "items[2]"),
        ("FETCH_FORBIDDEN", "items[3]"),
        ("INVALID_REQUEST", "items[4]"),
    ]


async def test_a_request_of_bad_items_does_not_reach_the_service(world: World) -> None:
    assert [code for code, _ in (await world.caller.call(["data:,", "x"])).items] == ["INVALID_REQUEST"] * 2
    assert world.service.seen == []


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_every_code_of_an_item_and_of_a_request(world: World, code: ErrorCode) -> None:
    world.service.answer = failing(EncoderError(code, "said by the service", param="items[0]"), width=6)
    assert [outcome[0] for outcome in await world.encoded(5, 6, 7)] == ["ok", code, "ok"]
    answer = await world.caller.call(["data:,", picture(6)])
    assert answer.items == [("INVALID_REQUEST", "items[0]"), (code, "items[1]")]
    world.service.refusal = EncoderError(code, "said by the service")
    assert await world.caller.call([picture(5)]) == Answer(code, [])


async def test_limits_on_items(world: World) -> None:
    assert (await world.caller.call([])).refused == "INVALID_REQUEST"
    assert (await world.caller.call(["x"] * 101)).refused == "TOO_LARGE"
    assert world.service.seen == []


async def test_hanging_up_cancels(world: World) -> None:
    call = await world.hanging_call()
    call.cancel()
    async with asyncio.timeout(30):
        while not world.service.cancelled:
            await asyncio.sleep(0.005)
    world.service.gate.set()
    assert (await world.encoded(5))[0][0] == "ok"


async def test_stop_finishes_what_is_in_flight(world: World) -> None:
    call = await world.hanging_call()
    world.front_end.stop(10)
    await asyncio.sleep(0.3)
    assert not world.serving.done()
    with pytest.raises((OSError, httpx.TransportError)):
        await world.caller.call([picture(5)])
    world.service.gate.set()
    assert (await call).items[0][0] == "ok"
    await asyncio.wait_for(world.serving, 30)


async def test_stop_is_bounded(world: World) -> None:
    call = await world.hanging_call()
    world.front_end.stop(0.1)
    await asyncio.wait_for(world.serving, 30)
    assert len(world.service.cancelled) == 1
    await asyncio.gather(call, return_exceptions=True)
