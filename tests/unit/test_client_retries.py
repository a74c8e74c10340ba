"""The client against servers that refuse, break off, stall and lie, on real sockets; and its pauses, on no clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest

from spmd_encoder.client import (
    AsyncClient,
    BadReplyError,
    BusyError,
    Client,
    EncoderClientError,
    NoReplyError,
    NoReplyInTimeError,
    RefusedError,
)
from spmd_encoder.client.flows import Broken, Flows, Load, Pause, Send
from spmd_encoder.client.reply import Reply
from spmd_encoder.client.sources import source_of

pytestmark = pytest.mark.timeout(60)


def http(status: int, body: bytes = b"{}", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def busy(status: int = 503, *headers: str) -> bytes:
    error = {"message": "later", "type": "x", "param": None, "code": "NOT_READY"}
    return http(status, json.dumps({"error": error}).encode(), *headers)


OK = http(200, b'{"version": "1"}', "content-type: application/json")
RESET = b"reset"
CLOSE = b"close"
HANG = b"hang"
DRIP = b"drip"


class Scripted:
    """A server that does what is written: one action per request (a connection may have several), then the last again.

    An action is the reply's bytes, or RESET, CLOSE, HANG, DRIP. A reply that is cut short is followed by a close.
    """

    def __init__(self, *script: bytes) -> None:
        self._script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # On Linux this wakes the accept, which a plain close does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(0.1)
        with connection, contextlib.suppress(OSError):
            while (request := self._receive(connection)) is not None:
                self.requests.append(request)
                action = self._script[min(len(self.requests), len(self._script)) - 1]
                match action:
                    case b"reset":
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    case b"close":
                        return
                    case b"hang":
                        self._over.wait(30)
                        return
                    case b"drip":
                        connection.sendall(http(200, b"", length=1000))
                        while not self._over.wait(0.05):
                            connection.sendall(b" ")
                        return
                    case _:
                        connection.sendall(action)
                        if b"content-length: 999" in action:
                            return

    def _receive(self, connection: socket.socket) -> bytes | None:
        data = b""
        while True:
            head, end, body = data.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            if end and len(body) >= length:
                return data
            try:
                piece = connection.recv(65536)
            except TimeoutError:
                if self._over.is_set():
                    return None
                continue
            if not piece:
                return None
            data += piece


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Any:
    def run(url: str, method: str = "info", *args: Any, **client: Any) -> Any:
        if request.param == "sync":
            with Client(url, **client) as blocking:
                return getattr(blocking, method)(*args)

        async def go() -> Any:
            async with AsyncClient(url, **client) as aio:
                return await getattr(aio, method)(*args)

        return asyncio.run(go())

    return run


@pytest.mark.parametrize(
    "first",
    [
        busy(503, "retry-after: 0"),
        busy(429, "retry-after: Mon, 30 Nov 2020 12:00:00 GMT"),
        busy(503),
        RESET,
        CLOSE,
        http(200, b"half", length=999),
        b"nonsense\r\n\r\n",
    ],
)
def test_one_bad_turn_is_not_seen(call: Any, first: bytes) -> None:
    with Scripted(first, OK) as server:
        assert call(server.url) == {"version": "1"}
        assert len(server.requests) == 2
        assert server.requests[0] == server.requests[1]


def test_bytes_are_sent_again_as_they_were(call: Any) -> None:
    error = {"message": "m", "type": "x", "param": None, "code": "INVALID_REQUEST"}
    with Scripted(RESET, busy(503, "retry-after: 0"), http(400, json.dumps({"error": error}).encode())) as server:
        for images in ([b"a" * 3000], [b"a", b"b" * 70000]):
            server.requests.clear()
            with pytest.raises(RefusedError):
                call(server.url, "encode", images)
            assert len(server.requests) == 3
            bodies = [request.partition(b"\r\n\r\n")[2] for request in server.requests]
            assert all(image in body for image in images for body in bodies)
            assert b"base64" not in server.requests[0]


@pytest.mark.parametrize("status", [400, 404, 500, 504])
def test_other_errors_are_not_tried_again(call: Any, status: int) -> None:
    with Scripted(http(status)) as server:
        with pytest.raises(RefusedError):
            call(server.url)
        assert len(server.requests) == 1


def test_in_the_end_the_refusal_is_raised(call: Any) -> None:
    with Scripted(busy(503, "retry-after: 0", "x-request-id: r1")) as server:
        with pytest.raises(BusyError, match="later") as caught:
            call(server.url, retries=2)
        assert (caught.value.code, caught.value.request_id, caught.value.retry_after_s) == ("NOT_READY", "r1", 0)
        assert len(server.requests) == 3


def test_in_the_end_the_broken_connection_is_raised(call: Any) -> None:
    with Scripted(RESET) as server:
        with pytest.raises(NoReplyError, match=r"no reply to /info in 3 attempts: the connection broke"):
            call(server.url, retries=2)
        assert len(server.requests) == 3


def test_a_server_that_is_not_there(call: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(NoReplyError, match="no connection"):
        call(url, retries=1)
    assert call(url, "ready") is False
    with pytest.raises(NoReplyInTimeError, match="no connection"):
        call(url, "wait_ready", 0.1)


@pytest.mark.parametrize("action", [HANG, DRIP])
def test_the_deadline_holds_for_silence_and_for_drips(call: Any, action: bytes) -> None:
    with Scripted(action) as server:
        with pytest.raises(NoReplyInTimeError, match=r"no reply to /info within 0.4 s"):
            call(server.url, timeout_s=0.4)
        assert len(server.requests) == 1


def test_a_server_that_comes_back_is_waited_for(call: Any) -> None:
    with Scripted(RESET, *[busy(503, "retry-after: 0")] * 12, OK) as server:
        assert call(server.url) == {"version": "1"}
        assert len(server.requests) == 14


def test_a_request_that_breaks_every_connection_is_not_sent_for_ever(call: Any) -> None:
    with Scripted(CLOSE) as server:
        with pytest.raises(NoReplyError, match="in 6 attempts"):
            call(server.url)
        assert len(server.requests) == 6


def test_a_peer_without_tls_is_not_waited_for(call: Any) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(http(400))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NoReplyError, match="in 1 attempt: no connection"):
            call(f"https://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_a_connection_is_used_again(call: Any) -> None:
    with Scripted(OK) as server, Client(server.url) as client:
        for _ in range(3):
            client.info()
        assert server.connections == 1


def test_a_connection_that_idled_away_is_made_anew() -> None:
    with Scripted(OK, CLOSE, OK) as server, Client(server.url) as client:
        assert client.info() == client.info()
        assert server.connections == 2


def test_a_compressed_reply_is_refused(call: Any) -> None:
    with (
        Scripted(http(200, b"x", "content-encoding: gzip")) as server,
        pytest.raises(BadReplyError, match="compressed"),
    ):
        call(server.url)


@pytest.mark.parametrize("body", [b"", b"[]", b"not json", b"\xff", b'{"data": 7}', b'{"data": [7]}'])
def test_replies_that_are_no_models(call: Any, body: bytes) -> None:
    with Scripted(http(200, body)) as server, pytest.raises(BadReplyError):
        call(server.url, "models")


def test_a_header_that_cannot_be_sent_is_not_shown(call: Any) -> None:
    with Scripted(OK) as server, pytest.raises(EncoderClientError) as caught:
        call(server.url, headers={"authorization": "Bearer secret\r\n"})
    assert "secret" not in str(caught.value)


def test_headers_go_with_every_request(call: Any) -> None:
    with Scripted(RESET, OK) as server:
        call(server.url, headers={"authorization": "Bearer key"})
        assert all(b"authorization: Bearer key" in request for request in server.requests)
        assert all(b"spmd_encoder-client/" in request for request in server.requests)


# -- flows, without a socket or a clock


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pauses(
    outcome: Reply | Broken, *, retries: int | None = None, timeout_s: float, send_s: float = 0.0
) -> Iterator[float]:
    """The pauses of a request that always meets `outcome`."""
    clock = Clock()
    flows = Flows(timeout_s=timeout_s, retries=retries, clock=clock, rng=random.Random(1))
    flow = flows.encode([source_of(b"x", 0)], None, "numpy")
    answer: object = None
    while True:
        try:
            step = flow.send(answer)
        except EncoderClientError:
            return
        match step:
            case Load():
                answer = step.run()
            case Send():
                assert step.deadline == timeout_s
                clock.now += send_s
                answer = outcome
            case Pause():
                clock.now += step.seconds
                assert clock.now < timeout_s
                answer = None
                yield step.seconds


def test_the_servers_wish_is_honoured_and_capped() -> None:
    for wish, least, most in ((1, 1.0, 2.0), (2, 2.0, 3.0), (8, 8.0, 10.0), (3600, 30.0, 37.5)):
        got = list(pauses(Reply(503, {"retry-after": str(wish)}, b""), retries=40, timeout_s=10_000))
        assert len(got) == 40
        assert all(least <= pause <= most for pause in got)
        assert len(set(got)) == 40, "refused clients must not come back together"
        assert max(got) - min(got) > (most - least) / 2, "a wish is rounded to seconds; pauses fill one"
    assert set(pauses(Reply(503, {"retry-after": "0"}, b""), retries=4, timeout_s=1000)) == {0.0}


def test_without_a_wish_pauses_double() -> None:
    for outcome in (Reply(429, {}, b""), Broken("gone")):
        got = list(pauses(outcome, retries=5, timeout_s=1000))
        assert all(0.05 * 2**index <= pause <= 0.1 * 2**index for index, pause in enumerate(got))
        assert len(got) == 5


def test_no_pause_beyond_the_deadline() -> None:
    assert list(pauses(Reply(503, {"retry-after": "30"}, b""), retries=9, timeout_s=20)) == []
    got = list(pauses(Reply(503, {"retry-after": "2"}, b""), retries=99, timeout_s=20, send_s=1.0))
    assert 5 <= len(got) <= 6


def test_a_server_that_comes_back_in_the_last_seconds_is_asked() -> None:
    for timeout_s in (2.0, 3.0, 60.0):
        assert timeout_s - sum(pauses(Broken("no connection"), timeout_s=timeout_s)) < 0.21


@pytest.mark.parametrize(
    "outcome", [Broken("no connection"), Reply(503, {}, b""), Reply(429, {"retry-after": "1"}, b"")]
)
def test_time_alone_bounds_what_may_get_better(outcome: Reply | Broken) -> None:
    got = list(pauses(outcome, timeout_s=60))
    assert 60 - 5 <= sum(got) < 60
    assert len(got) > 10


def test_what_would_end_in_the_same_way_is_not_tried_again() -> None:
    assert list(pauses(Broken("not its certificate", is_final=True), timeout_s=20)) == []
    assert len(list(pauses(Broken("reset", was_made=True), timeout_s=1000))) == 5


def test_a_long_wait_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    list(pauses(Broken("no connection"), timeout_s=60))
    assert [record.getMessage() for record in caplog.records] == [
        "no reply to /v1/encode yet (no connection); trying for 58 s more"
    ]
    caplog.clear()
    list(pauses(Broken("no connection"), timeout_s=60, retries=5))
    list(pauses(Reply(429, {}, b""), timeout_s=60))
    assert caplog.records == []


def test_what_came_too_late_is_not_tried_again() -> None:
    assert list(pauses(Broken("slow", is_late=True), retries=9, timeout_s=20)) == []
