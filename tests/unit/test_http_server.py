"""`HttpFrontEnd` on a real socket: vanishing clients, load, and the end of serving."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from spmd_encoder.api.types import ItemFailure
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.body import Timeouts
from spmd_encoder.frontends.http.server import HttpFrontEnd
from tests.harness.fake_service import FakeService, picture, picture_file, size_embedding
from tests.unit.test_http_wire import CONFIG, GOOD, Reply, Served, Wire, post, serve_fake

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake() as served:
        yield served


async def test_a_vanished_client_cancels_at_once(served: Served) -> None:
    served.service.gate.clear()
    for number in range(3):
        wire = await served.connect()
        served.service.arrived.clear()
        wire.send(post(GOOD, f"X-Request-Id: {number}"))
        await served.service.arrived.wait()
        assert served.service.reserved == len(GOOD)
        wire.close()
        async with asyncio.timeout(30):
            while len(served.service.cancelled) <= number:
                await asyncio.sleep(0.002)
    assert served.service.cancelled == ["0", "1", "2"]
    half = await served.connect()
    half.send(post(GOOD[:20], length=len(GOOD)))
    await asyncio.sleep(0.05)
    half.close()
    await asyncio.sleep(0.05)
    assert served.service.reserved == 0


@contextmanager
def busy_pool(served: Served) -> Iterator[None]:
    """All threads of the front end have something else to do, while the context is open."""
    until = threading.Event()
    for _ in range(8):
        served.front_end.shared.pool.submit(until.wait, 20)
    try:
        yield
    finally:
        until.set()


# Smaller bodies need no thread.
LARGE_FILE = picture_file(5) + bytes(100_000)
LARGE = json.dumps({"items": [{"image": "data:image/png;base64," + base64.b64encode(LARGE_FILE).decode()}]}).encode()


@pytest.mark.parametrize("kind", ["application/json", "image/png", "multipart/form-data; boundary=b"])
async def test_what_waits_for_a_thread_is_dropped_when_its_client_goes(served: Served, kind: str) -> None:
    body = {"a": LARGE, "i": LARGE_FILE, "m": form_of(LARGE_FILE)}[kind[0]]
    with busy_pool(served):
        wire = await served.connect()
        wire.send(post(body, f"Content-Type: {kind}"))
        async with asyncio.timeout(30):
            while not served.service.reserved:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            wire.close()
            while served.service.reserved:
                await asyncio.sleep(0.01)
    wire = await served.connect()
    wire.send(post(GOOD, "X-Request-Id: next"))
    assert (await wire.reply()).status == 200
    assert [request.request_id for request in served.service.seen] == ["next"]


async def test_small_bodies_wait_for_no_thread(served: Served) -> None:
    with busy_pool(served):
        wire = await served.connect()
        wire.send(post(GOOD))
        assert (await wire.reply()).status == 200


async def test_waiting_for_a_thread_is_part_of_the_requests_time() -> None:
    config = replace(CONFIG, limits=replace(CONFIG.limits, request_timeout_s=4.0))
    async with serve_fake(Timeouts(), config) as served:
        wire, late = await served.connect(), await served.connect()
        with busy_pool(served):
            late.send(post(LARGE))
            reply = await late.reply()
            assert (reply.status, reply.code) == (504, "DEADLINE_EXCEEDED")
            wire.send(post(LARGE))
            await asyncio.sleep(0.5)
        assert (await wire.reply()).status == 200
        assert served.service.seen[-1].deadline_s is not None
        assert served.service.seen[-1].deadline_s < 3.6


async def test_stop_closes_idle_connections_and_finishes_others(served: Served) -> None:
    served.service.gate.clear()
    idle, busy = await served.connect(), await served.connect()
    idle.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await idle.reply()).status == 200
    busy.send(post(GOOD))
    await served.service.arrived.wait()
    served.front_end.stop(10)
    assert await idle.is_closed()
    assert not served.front_end.is_serving
    served.service.gate.set()
    assert (await busy.reply()).status == 200
    assert await busy.is_closed()
    await asyncio.wait_for(served.serving, 30)


async def test_cancelling_serve_ends_everything() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    service = FakeService()
    service.gate.clear()
    front_end = HttpFrontEnd(service, CONFIG, sock)
    serving = asyncio.create_task(front_end.serve())
    wire = Wire(*await asyncio.open_connection(*sock.getsockname()))
    wire.send(post(GOOD))
    await service.arrived.wait()
    serving.cancel()
    await asyncio.wait({serving}, timeout=3)
    assert serving.cancelled()
    assert len(service.cancelled) == 1
    assert service.reserved == 0
    reply = await wire.reply()
    assert (reply.status, reply.code) == (503, "DRAINING")


async def test_signals_are_left_alone(served: Served) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with httpx.AsyncClient() as client:
        await client.get(f"http://127.0.0.1:{served.address[1]}/health")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_many_clients_with_good_and_bad_items(served: Served) -> None:
    url = f"http://127.0.0.1:{served.address[1]}/v1/encode"

    async def one(client: httpx.AsyncClient, number: int) -> None:
        images = [picture(number + 1), "data:,", picture(100)]
        reply = await client.post(url, json={"items": [{"image": i} for i in images], "encoding_format": "float"})
        first, second, third = reply.json()["data"]
        assert first["embedding"] == [number + 1, 9]
        assert second["error"]["code"] == "INVALID_REQUEST"
        assert third["embedding"] == [100, 9]

    async with httpx.AsyncClient(timeout=20) as client:
        await asyncio.gather(*[one(client, number) for number in range(64)])


async def watched(served: Served, request: bytes) -> tuple[Reply, float]:
    """The reply, and the most that the loop worked at a stretch until it was there, in seconds of processor time."""
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            worst = max(worst, time.thread_time() - before)

    wire = await served.connect()
    watcher = asyncio.create_task(watch())
    wire.send(request)
    reply = await wire.reply()
    watcher.cancel()
    print(f"longest stretch {worst * 1000:.0f} ms")
    return reply, worst


async def test_large_bodies_and_replies_do_not_block_the_loop() -> None:
    """While 24 MiB of media and 16 MiB of embedding pass."""
    big = base64.b64encode(b"BM" + bytes(24 * 2**20)).decode()
    body = json.dumps({"items": [{"image": f"data:;base64,{big}"}, {"image": picture(5)}]}).encode()
    async with serve_fake(Timeouts()) as served:
        served.service.answer = lambda item: replace(size_embedding(item), shape=(2**22,), data=bytes(2**24))
        reply, worst = await watched(served, post(body))
    assert reply.status == 200
    assert json.loads(reply.body)["data"][0]["error"]["code"] == "MEDIA_CORRUPT"
    assert worst < 0.5


async def test_server_errors_are_not_fatal(served: Served) -> None:
    wire = await served.connect()
    served.service.refusal = RuntimeError("boom")
    wire.send(post(GOOD))
    assert (await wire.reply()).code == "INTERNAL"
    served.service.refusal = None
    served.service.answer = lambda item: ItemFailure(error=EncoderError(ErrorCode.WORKER_DIED, "died"), replica=3)
    wire.send(post(GOOD))
    reply = await wire.reply()
    assert (reply.status, reply.code, reply.headers["x-spmd-replica"]) == (500, "WORKER_DIED", "3")


async def test_large_promises_without_bytes_shut_nobody_out(served: Served) -> None:
    served.service.max_inflight_bytes = 4 * 2**20
    idle = [await served.connect() for _ in range(5)]
    for wire in idle:
        wire.send(post(GOOD[:1], length=60 * 2**20))
    await asyncio.sleep(0.1)
    assert 0 < served.service.reserved <= 5 * 256 * 1024
    wire = await served.connect()
    wire.send(post(GOOD))
    async with asyncio.timeout(30):
        await served.service.arrived.wait()
    for one in idle:
        one.close()


def form_of(*files: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
    return b"".join(head + file + b"\r\n" for file in files) + b"--b--\r\n"


FORM_TYPE = "Content-Type: multipart/form-data; boundary=b"


async def test_a_large_form_does_not_block_the_loop() -> None:
    body = form_of(b"BM" + bytes(24 * 2**20), picture_file(5))
    async with serve_fake(Timeouts()) as served:
        reply, worst = await watched(served, post(body, FORM_TYPE))
    first, second = json.loads(reply.body)["data"]
    assert (first["error"]["code"], second["status"]) == ("MEDIA_CORRUPT", "ok")
    assert worst < 0.5


async def test_a_form_that_comes_too_slowly(served: Served) -> None:
    wire = await served.connect()
    body = form_of(picture_file(5))
    wire.send(post(body[:60], FORM_TYPE, length=len(body)))
    reply = await wire.reply()
    assert (reply.status, reply.code) == (408, "REQUEST_TIMEOUT")
    assert served.service.reserved == 0


async def test_a_vanished_client_ends_its_fetches() -> None:
    """The connection to the host of the picture is closed, and nothing is held."""
    came, gone = asyncio.Event(), asyncio.Event()

    async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        while await reader.read(2**16):
            pass
        gone.set()
        writer.close()

    async with await asyncio.start_server(never_answers, "127.0.0.1", 0) as host:
        url = f"http://127.0.0.1:{host.sockets[0].getsockname()[1]}/a.png"
        media = replace(CONFIG.media, allow_private_media_hosts=True)
        async with serve_fake(config=replace(CONFIG, media=media)) as served:
            wire = await served.connect()
            wire.send(post(json.dumps({"items": [{"image": url}]}).encode()))
            await came.wait()
            assert served.service.reserved > 0
            wire.close()
            await gone.wait()
            assert served.service.seen == []
