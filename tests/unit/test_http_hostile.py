"""Requests that two readers could cut differently, that never end, or that are no requests: on a real socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from spmd_encoder.frontends.http.body import Timeouts
from tests.harness.fake_server import fake_server
from tests.harness.fake_service import picture, picture_file
from tests.unit.test_http_wire import GOOD, Reply, Served, post, serve_fake

pytestmark = pytest.mark.timeout(30)

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake() as served:
        yield served


async def replies(served: Served, *sent: bytes) -> list[Reply]:
    """All that is answered until the server closes. What is sent comes in pieces of its own."""
    wire = await served.connect()
    for piece in sent:
        wire.send(piece)
        await asyncio.sleep(0.05)
    found = []
    async with asyncio.timeout(30):
        while True:
            try:
                found.append(await wire.reply())
            except asyncio.IncompleteReadError as end:
                assert end.partial == b""
                return found


# -- Upgrade


@pytest.mark.parametrize("upgrade", [H2C, ("Connection: upgrade", "Upgrade: websocket"), ("Upgrade: h2c",)])
async def test_a_wish_to_upgrade_is_ignored_and_the_body_is_read(
    served: Served, upgrade: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    whole = post(GOOD, *upgrade)
    head, body = whole[: -len(GOOD)], whole[-len(GOOD) :]
    for pieces in ([whole], [head, body], [head[:40], head[40:] + body[:5], body[5:]]):
        wire = await served.connect()
        for piece in pieces:
            wire.send(piece)
            await asyncio.sleep(0.02)
        reply = await wire.reply()
        assert (reply.status, json.loads(reply.body)["data"][0]["status"]) == (200, "ok")
        wire.send(whole + LIVE)
        assert [(await wire.reply()).status for _ in range(2)] == [200, 200]
    assert caplog.records == []


async def test_a_body_is_never_the_next_request(served: Served) -> None:
    smuggled = b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    wire = await served.connect()
    wire.send(post(smuggled, *H2C) + LIVE)
    assert [(await wire.reply()).status for _ in range(2)] == [400, 200]
    chunked = post(b"", *H2C, "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    wire.send(chunked)
    await asyncio.sleep(0.02)
    wire.send(chunk(GOOD) + b"0\r\n\r\n" + LIVE)
    assert [(await wire.reply()).status for _ in range(2)] == [200, 200]


async def test_it_does_not_matter_how_requests_are_cut(served: Served) -> None:
    choose = random.Random(1)
    stream = b"".join(
        (
            post(GOOD, *H2C),
            CHUNKED + chunk(GOOD[:9]) + chunk(GOOD[9:]) + b"0\r\nX-Trailer: GET / HTTP/1.1\r\n\r\n",
            post(b"GET /info HTTP/1.1\r\n\r\n", *H2C),
            b"\r\n" + LIVE,
            post(GOOD, "Connection: close"),
        )
    )
    for _ in range(25):
        cuts = sorted(choose.sample(range(1, len(stream)), 5))
        wire = await served.connect()
        for start, end in itertools.pairwise([0, *cuts, len(stream)]):
            wire.send(stream[start:end])
            await asyncio.sleep(0.002)
        answer = await asyncio.wait_for(wire.reader.read(), 30)
        assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 400, 200, 200], cuts


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_http2(tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(picture_file(31))
    (tmp_path / "request.json").write_text(json.dumps({"items": [{"image": picture(31)}]}))
    bodies = [
        ["-H", "Content-Type: image/png", "--data-binary", "@photo.png"],
        ["-F", "image=@photo.png"],
        ["-H", "Content-Type: application/json", "--data-binary", "@request.json"],
    ]
    with fake_server() as server:
        for body in bodies:
            command = ["curl", "--http2", "-sS", "--fail-with-body", "--noproxy", "*", f"{server.url}/v1/encode", *body]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
            assert json.loads(done.stdout)["data"][0]["status"] == "ok"


# -- bodies without an end


async def test_trailers_are_bounded() -> None:
    async with serve_fake(Timeouts()) as served:
        process = psutil.Process()
        for trailer in (b"X-T: " + b"a" * 1000 + b"\r\n", b"a" * 1000, b"X:y\r\n" * 200):
            wire = await served.connect()
            wire.send(CHUNKED + chunk(b"{") + b"0\r\n")
            before = process.memory_info().rss
            for _ in range(20_000):
                wire.send(trailer)
                await asyncio.wait_for(wire.writer.drain(), 30)
                if wire.reader.at_eof() or wire.reader._buffer:  # type: ignore[attr-defined]
                    break
            reply = await wire.reply()
            assert (reply.status, reply.code) == (431, "HEADERS_TOO_LARGE")
            assert process.memory_info().rss - before < 20 * 2**20
            wire.close()


async def test_headers_and_trailers_that_come_at_once_are_bounded(served: Served) -> None:
    many = b"X-Many: b\r\n" * 7000
    for sent in (LIVE[:-2] + many + b"\r\n", CHUNKED + chunk(b"{") + b"0\r\n" + many + b"\r\n"):
        (reply,) = await replies(served, sent)
        assert (reply.status, reply.code) == (431, "HEADERS_TOO_LARGE")


async def test_trailers_do_not_become_headers(served: Served) -> None:
    wire = await served.connect()
    wire.send(CHUNKED + chunk(GOOD) + b"0\r\nX-Request-Id: late\r\nContent-Type: text/plain\r\n\r\n" + LIVE)
    first = await wire.reply()
    assert (first.status, first.headers["x-request-id"] != "late") == (200, True)
    assert (await wire.reply()).status == 200


async def test_what_surrounds_chunks_is_bounded() -> None:
    async with serve_fake(Timeouts()) as served:
        wire = await served.connect()
        wire.send(CHUNKED + b"1;" + b"e" * 500_000)
        reply = await wire.reply()
        assert (reply.status, reply.code) == (431, "HEADERS_TOO_LARGE")
        pieces = b"".join(chunk(bytes([byte])) for byte in GOOD)
        assert len(pieces) < 64 * 1024
        wire = await served.connect()
        wire.send(CHUNKED + pieces + b"0\r\n\r\n")
        assert (await wire.reply()).status == 200
        wire = await served.connect()
        wire.send(CHUNKED + chunk(b" ") * 100_000 + chunk(GOOD) + b"0\r\n\r\n")
        assert (await wire.reply()).status == 200


# -- malformed


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([CHUNKED, b"zz\r\n"], "chunk size"),
        ([CHUNKED, b"3\nabc\n0\n\n"], "chunk size"),
        ([CHUNKED, chunk(GOOD), b"5\r\nabcdefgh\r\n"], "chunk"),
        ([CHUNKED.replace(b"chunked", b"gzip")], "Transfer-Encoding"),
        ([CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n"], "Transfer-Encoding"),
        ([CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n"], "Transfer-Encoding"),
        ([CHUNKED[:-2] + b"Content-Length: 3\r\n\r\n"], "Content-Length"),
        ([b"GET /health/live HTTP/1.1\r\n\r\n"], "Host"),
        ([b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"], "Host"),
        ([b"GET /health/live HTTP/2.0\r\nHost: localhost\r\n\r\n"], "HTTP/1.1"),
        ([b"GET /health/live\r\n\r\n"], "HTTP/1.1"),
        ([b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"], "CONNECT"),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], "not a valid HTTP request"),
        ([b"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n"], "not a valid HTTP request"),
        ([b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n"], "target"),
    ],
)
async def test_malformed_requests_get_a_400_and_the_connection_ends(
    served: Served, sent: list[bytes], says: str
) -> None:
    (reply,) = await replies(served, *sent)
    assert (reply.status, reply.code, reply.headers["connection"]) == (400, "INVALID_REQUEST", "close")
    assert says in json.loads(reply.body)["error"]["message"]
    assert served.service.seen == []


async def test_http_1_0_needs_no_host(served: Served) -> None:
    (reply,) = await replies(served, b"GET /health/live HTTP/1.0\r\n\r\n")
    assert reply.status == 200


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01 hello\r\n\r\n", CHUNKED + b"zz\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_good_requests_before_a_bad_one_keep_their_replies(served: Served, garbage: bytes) -> None:
    """And what comes after it is not read."""
    served.service.gate.clear()
    answers = asyncio.create_task(replies(served, post(GOOD) + post(b"{") + garbage, LIVE))
    await served.service.arrived.wait()
    await asyncio.sleep(0.2)
    assert not answers.done()
    served.service.gate.set()
    assert [reply.status for reply in await answers] == [200, 400, 400]


async def test_a_broken_body_gives_its_request_up(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.service.gate.clear()
    wire = await served.connect()
    wire.send(CHUNKED + chunk(b"{"))
    await asyncio.sleep(0.05)
    assert served.service.reserved > 0
    wire.send(b"oh no\r\n")
    assert (await wire.reply()).status == 400
    assert await wire.is_closed()
    assert served.service.reserved == 0
    wire.writer.close()
    await asyncio.sleep(0.1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_malformed_requests_are_logged_now_and_then(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        assert [reply.status for reply in await replies(served, b"secret\r\n\r\n")] == [400]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert "secret" not in caplog.text


# -- ends


async def test_a_half_closed_client_gets_its_reply(served: Served) -> None:
    served.service.gate.clear()
    wire = await served.connect()
    wire.send(post(GOOD))
    wire.writer.write_eof()
    await served.service.arrived.wait()
    await asyncio.sleep(0.2)
    assert served.service.cancelled == []
    served.service.gate.set()
    assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    reply = await wire.reply()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert await wire.is_closed()


async def test_half_closed_with_several_requests(served: Served) -> None:
    for sent, statuses in (
        (post(GOOD) + LIVE, [200, 200]),
        (post(GOOD) + b"what?\r\n\r\n", [200, 400]),
        (post(GOOD) + LIVE[:20], [200, 400]),
        (post(GOOD) + post(GOOD)[:-3], [200, 400]),
    ):
        served.service.gate.clear()
        served.service.arrived.clear()
        wire = await served.connect()
        wire.send(sent)
        wire.writer.write_eof()
        await served.service.arrived.wait()
        await asyncio.sleep(0.05)
        served.service.gate.set()
        answer = await asyncio.wait_for(wire.reader.read(), 30)
        assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [100, *statuses]


async def test_a_client_that_closes_after_half_a_request_is_gone(served: Served) -> None:
    wire = await served.connect()
    wire.send(post(GOOD)[:-3])
    wire.writer.write_eof()
    assert await wire.is_closed()
    assert served.service.reserved == 0


async def test_empty_lines_keep_no_connection_alive() -> None:
    async with serve_fake(Timeouts(keep_alive_s=1.0)) as served:
        wire = await served.connect()
        wire.send(LIVE)
        assert (await wire.reply()).status == 200
        closed = asyncio.create_task(wire.is_closed(within_s=5))
        while not closed.done():
            wire.send(b"\r\n")
            await asyncio.sleep(0.1)
        assert await closed


async def test_a_refused_request_whose_body_came_leaves_an_idle_connection() -> None:
    """Which is closed in time, as any other."""
    async with serve_fake(Timeouts(keep_alive_s=1.0)) as served:
        wire = await served.connect()
        wire.send(post(b"", "Content-Type: text/plain", length=100))
        assert (await wire.reply()).status == 415
        wire.send(b" " * 100)
        assert await wire.is_closed(within_s=5)


async def test_a_long_body_behind_another_request_is_no_idle_connection() -> None:
    async with serve_fake(Timeouts(keep_alive_s=1.0)) as served:
        served.service.gate.clear()
        wire = await served.connect()
        whole = post(GOOD)
        wire.send(whole + whole[:-5])
        await served.service.arrived.wait()
        served.service.gate.set()
        assert (await wire.reply()).status == 200
        await asyncio.sleep(1.5)
        wire.send(whole[-5:])
        assert (await wire.reply()).status == 200
