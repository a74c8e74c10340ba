"""uvicorn's connection with what it leaves to a proxy: slow headers, and bodies or replies that nobody reads."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spmd_encoder.frontends.http.errors import ErrorBody, ErrorReply

_MAX_HEADER_BYTES = 64 * 1024
# How long a client that got its reply early may go on sending. Closing at once would reset the connection and lose
# the reply on its way.
_LINGER_S = 2.0
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class EncoderHttpProtocol(HttpToolsProtocol):
    """`header_s` and `reply_idle_s` (seconds) and `max_connections` are set by the server's subclass of this class."""

    header_s = 30.0
    reply_idle_s = 30.0
    max_connections = 65536

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._reply_timer: asyncio.TimerHandle | None = None
        self._header_bytes: int | None = 0
        """Bytes of the headers being read; None while there are none being read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            # One more would take descriptors that the server itself needs, to heal for example.
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._end_reply_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client takes its reply slower than it comes. One that takes nothing would hold it for ever."""
        super().pause_writing()
        self._reply_timer = self.loop.call_later(self.reply_idle_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_reply_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(431, "HEADERS_TOO_LARGE", f"the headers have more than {_MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_bytes is None:  # not the connection's first, whose time and bytes count since it was made
            self._await_headers()

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and self.cycle.more_body and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "INVALID_REQUEST", "this is not a valid HTTP request")

    def _await_headers(self) -> None:
        self._disarm()
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(self.header_s, self._headers_late)

    def _disarm(self) -> None:
        self._header_bytes = None
        for timer in (self._header_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._linger_timer = None

    def _end_reply_timer(self) -> None:
        if self._reply_timer is not None:
            self._reply_timer.cancel()
            self._reply_timer = None

    def _headers_late(self) -> None:
        self._refuse(408, "REQUEST_TIMEOUT", f"no complete headers arrived within {self.header_s:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer below the application, and close."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else a reply is on its way already
            body = msgspec.json.encode(ErrorReply(ErrorBody(message, "invalid_request_error", None, code)))
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nx-spmd-replica: none\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
