"""uvicorn's connection with what it leaves to a proxy: slow, endless, malformed and half-closed requests, and replies
that nobody reads."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from spmd_encoder.frontends.http.heads import HeadError, check_head, check_header_bytes, head_without_upgrade, refusal
from spmd_encoder.frontends.http.turns import Turns
from spmd_encoder.observability.logging import SparseLog

# How long a client that got its reply early may go on sending. Closing at once would reset the connection and lose
# the reply on its way.
_LINGER_S = 2.0
# How often a half-closed connection is looked at: soon, since most are whole closes, then seldom.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 1.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class EncoderHttpProtocol(HttpToolsProtocol):
    """`header_s` and `reply_idle_s` (seconds), `max_connections`, `odd` and `turns` are set by the server's subclass of
    this class. `odd` is told of malformed requests."""

    header_s = 30.0
    reply_idle_s = 30.0
    max_connections = 1024
    odd: SparseLog
    turns: Turns

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._reply_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._unfruitful_bytes = 0
        """Bytes of whole reads since the last end of headers or piece of a body: lines and chunks without an end."""
        self._header_bytes = 0
        """Bytes of the headers, or trailers, that have come."""
        self._is_message = False
        """Whether a request has begun and not ended."""
        self._has_head = False
        """Whether the one that has begun is `self.cycle`."""
        self._is_upgrade = False
        self._is_deaf = False
        """Whether nothing more is read: what came is no HTTP, or was refused."""
        self._last_words: bytes | None = None
        """What is sent, before the connection ends, after the replies that are on their way."""
        self._running: RequestResponseCycle | None = None
        self._before: RequestResponseCycle | None = None
        """The request before `self.cycle`."""

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            # One more would take descriptors that the server itself needs, to heal for example.
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        for timer in (self._header_timer, self._linger_timer, self._reply_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unfruitful_bytes += len(data)
        try:
            self._feed(memoryview(data))
            check_header_bytes(self._unfruitful_bytes)
            # Most heads come whole. The time of the connection's first one counts since that was made.
            if self._is_message and not self._has_head and self._header_timer is None:
                self._await_headers()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse_fault(cause if isinstance(cause, HeadError) else error)
        except HeadError as error:
            self._refuse_fault(error)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: it has gone, or it has only shut down its sending half and waits for its reply.

        The two look alike until something is sent: a client that has gone resets the connection. An interim reply is
        the harmless thing to send, once; HTTP/1.0 knows none, so there the end of sending is taken for a hang-up.
        """
        if self._is_message and not self._is_deaf:
            whole = self._before if self._has_head else self.cycle
            if whole is None or whole.response_complete:
                return None
            self._refuse(400, "INVALID_REQUEST", "the last request on this connection is not whole")
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.disconnected or cycle.scope["http_version"] != "1.1":
            return None
        if self._last_words is None:
            cycle.keep_alive = False
        if self._running is not None and not self._running.response_started:
            self.transport.write(_CONTINUE)
        self._look_for_reset(_FIRST_LOOK_S)
        return True

    def pause_writing(self) -> None:
        """The client takes its reply slower than it comes. One that takes nothing would hold it for ever."""
        super().pause_writing()
        self._reply_timer = self.loop.call_later(self.reply_idle_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._reply_timer is not None:
            self._reply_timer.cancel()
            self._reply_timer = None
        super().resume_writing()

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_message, self._has_head, self._header_bytes = True, False, 0
        self._unset_keepalive_if_required()  # and not before: empty lines between requests are no sign of life

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        check_header_bytes(self._header_bytes)
        if not self._has_head:  # trailers are not for us, and must not become headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            self._is_upgrade = True  # the parser takes the body for another protocol: `_feed` tells it the head anew
            return
        self._disarm()
        self._unfruitful_bytes = self._header_bytes = 0
        check_head(self.parser.get_http_version(), method, self.headers)
        before = self.cycle
        super().on_headers_complete()
        self._before, self._has_head = before, True

    def on_chunk_header(self) -> None:
        self._unfruitful_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._unfruitful_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._disarm()
        self._is_message = False
        self._unfruitful_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # -- the application's side

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        path = cycle.scope["path"]
        if not self.turns.waits(path):
            self._begin(cycle, app)
        elif (refusal := self.turns.refusal(path, cycle.scope["method"])) is not None:
            self._begin(cycle, refusal)
        else:
            self.turns.wait(partial(self._begin, cycle, app))

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not cycle.disconnected:  # else its client has gone while it waited
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        if self._last_words is not None:
            self._end(self._last_words)
        elif self._is_message:
            self._unset_keepalive_if_required()
            if self._has_head and self._linger_timer is None:
                self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    # -- small parts

    def _feed(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            version, method = self.parser.get_http_version(), self.parser.get_method()
            head = head_without_upgrade(version, method, self.url, self.headers)
            self._is_upgrade = False
            self.parser = httptools.HttpRequestParser(self)
            # As uvicorn does: what follows a request that asks to close is not looked at.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.header_s, self._headers_late)

    def _headers_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_headers()  # nothing is read while a reply before is on its way
        else:
            self._refuse(408, "REQUEST_TIMEOUT", f"no complete headers arrived within {self.header_s:g} s")

    def _disarm(self) -> None:
        for timer in (self._header_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._linger_timer = None

    def _refuse_fault(self, error: httptools.HttpParserError | HeadError) -> None:
        if isinstance(error, httptools.HttpParserCallbackError):
            error = HeadError("this is not a valid HTTP request: its target is not a path")
        elif isinstance(error, httptools.HttpParserError):  # it has one of the parser's own constant sentences
            error = HeadError(f"this is not a valid HTTP request: {error}")
        self.odd.warning("a malformed request is refused: %s", error)
        self._refuse(error.status, error.code, str(error))

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer below the application, after the replies that are on their way, and close."""
        self._disarm()
        self._is_deaf = True
        if self.transport.is_closing():
            return
        words, is_own = refusal(status, code, message), self._is_message and self._has_head
        cycle = self.cycle
        if is_own and cycle.response_started:
            words = b""  # it has its answer already
        elif is_own and self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
            self.cycle = cycle = self._before  # type: ignore[assignment]
        elif is_own:
            cycle.disconnected = True  # for the application it is as if the client had gone
            cycle.message_event.set()
            self._end(words)
            return
        if cycle is None or cycle.response_complete:
            self._end(words)
        else:
            self._last_words = words

    def _end(self, words: bytes) -> None:
        """Send `words` and close when the client has closed, or a moment later: what it still sends is not read, and a
        close at once would reset the connection before it has read ours."""
        self._unset_keepalive_if_required()
        self.transport.write(words)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _look_for_reset(self, pause_s: float) -> None:
        """Of a half-closed connection, which is not read any more and would not tell."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        pause = min(2 * pause_s, _LAST_LOOK_S)
        self._look_timer = self.loop.call_later(pause_s, self._look_for_reset, pause)
