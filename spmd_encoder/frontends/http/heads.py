"""Requests that are refused before the application sees them: which heads, and what is answered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spmd_encoder.frontends.http.errors import ErrorBody, ErrorReply

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


MAX_HEADER_BYTES = 64 * 1024


class HeadError(Exception):
    """A head that is well formed and yet not taken. Raised inside the parser's callbacks, which ends the parsing."""

    def __init__(self, message: str, *, status: int = 400, code: str = "INVALID_REQUEST") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def check_header_bytes(num_bytes: int) -> None:
    """Raises `HeadError` where headers, or trailers, are larger than `MAX_HEADER_BYTES`."""
    if num_bytes > MAX_HEADER_BYTES:
        message = f"the headers, or the trailers, have more than {MAX_HEADER_BYTES} bytes"
        raise HeadError(message, status=431, code="HEADERS_TOO_LARGE")


def check_head(version: str, method: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises `HeadError` where two readers could differ on where the request ends or whom it is for (RFC 9112).

    `version` as in "1.1"; names of headers are in lower case.
    """
    if version not in ("1.0", "1.1"):
        raise HeadError("only HTTP/1.0 and HTTP/1.1 are spoken here")
    if method == b"CONNECT":
        raise HeadError("CONNECT is for proxies, and this server is none")
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (version == "1.1" and not hosts):
        raise HeadError("an HTTP/1.1 request has one Host header")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or codings != [b"chunked"]):
        raise HeadError("the only Transfer-Encoding that is read is `chunked`, once, in HTTP/1.1")


def head_without_upgrade(version: str, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The same request without its wish for another protocol, which a server is free to ignore."""
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    lines += [b"%s: %s" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


def refusal(status: int, code: str, message: str) -> bytes:
    """The whole reply, after which the connection ends."""
    body = msgspec.json.encode(ErrorReply(ErrorBody(message, "invalid_request_error", None, code)))
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-spmd-replica: none\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
