"""What both drivers do alike with httpx: its settings, a request's arguments, a body within limits, its errors."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from typing import Any

import httpx

from spmd_encoder import __version__
from spmd_encoder.client.errors import BadReplyError, EncoderClientError
from spmd_encoder.client.flows import Broken, Send
from spmd_encoder.client.reply import Reply

_CONNECT_S = 10.0
# Far above any sensible request's reply; it keeps a hostile server from filling the memory.
_MAX_REPLY_BYTES = 2**32


def client_arguments(url: str, headers: Mapping[str, str] | None, verify: ssl.SSLContext | bool) -> dict[str, Any]:
    """For `httpx.Client` and `httpx.AsyncClient`, but for their transport. Proxies of the environment are not
    used: servers are near.

    Raises ValueError for a URL that is no server's address.
    """
    try:
        base = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"the server's URL is not valid: {error}") from None
    if base.scheme not in ("http", "https") or not base.host or base.query or base.fragment:
        raise ValueError("the server's URL must look like http://127.0.0.1:30000")
    if base.port is not None and not 0 < base.port < 2**16:
        raise ValueError(f"the server's URL must have a port from 1 to {2**16 - 1}")
    try:
        httpx.Headers(headers)
    except (UnicodeEncodeError, TypeError, AttributeError, ValueError):  # not told, as a header may be a key
        raise ValueError("headers must be names and values of ASCII characters") from None
    return {
        "base_url": base,
        "headers": {
            "user-agent": f"spmd_encoder-client/{__version__}",
            "accept-encoding": "identity",
            **(headers or {}),
        },
        "verify": tls_of(verify if base.scheme == "https" else False),
        "trust_env": False,
        "follow_redirects": False,
    }


def tls_of(verify: ssl.SSLContext | bool) -> ssl.SSLContext:
    """One for all connections. Without `verify` it reads no certificates, which takes 10 ms."""
    return verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify, trust_env=False)


def request_arguments(step: Send) -> dict[str, Any]:
    """For `stream` of either client. Timeouts are per operation; `Collector` and the async driver bound the sum."""
    request, left_s = step.request, max(0.001, step.deadline - time.monotonic())
    arguments: dict[str, Any] = {
        "method": request.method,
        "url": request.path,
        "params": dict(request.params),
        "headers": {**request.headers, **step.timeout(left_s)},
        "timeout": httpx.Timeout(left_s, connect=min(left_s, _CONNECT_S)),
    }
    if request.files:
        parts = [
            (name, (str(index), data, "application/octet-stream")) for index, (name, data) in enumerate(request.files)
        ]
        return {**arguments, "files": parts}
    return {**arguments, "content": request.content}


class Collector:
    """A reply's body as it comes. Raises `BadReplyError` where it is endless, TimeoutError after the deadline."""

    def __init__(self, response: httpx.Response, deadline: float) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadReplyError("the reply is compressed, which was not asked for")
        self._response = response
        self._deadline = deadline
        self._body = bytearray()

    def add(self, piece: bytes) -> None:
        if len(self._body) + len(piece) > _MAX_REPLY_BYTES:
            raise BadReplyError(f"the reply has more than {_MAX_REPLY_BYTES} bytes; send fewer pictures per request")
        if time.monotonic() > self._deadline:
            raise TimeoutError("the reply came too slowly")
        self._body += piece

    def reply(self) -> Reply:
        headers = {name.lower(): value for name, value in self._response.headers.items()}
        return Reply(self._response.status_code, headers, self._body)


def broken(error: httpx.TransportError | TimeoutError, step: Send) -> Broken:
    """What httpx says, as an outcome. Raises `EncoderClientError` where another attempt would be the same."""
    match error:
        case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
            # httpx quotes the header, which may be a key.
            raise EncoderClientError("the request cannot be written as HTTP; look at `headers` and the URL")
        case httpx.ConnectTimeout():
            return Broken("the connection was not made in time", is_late=time.monotonic() >= step.deadline)
        case httpx.ConnectError():
            return Broken(f"no connection: {error}", is_final=_is_of_tls(error))
        case httpx.TimeoutException() | TimeoutError():
            return Broken("the server was too slow", is_late=True)
        case _:
            return Broken(f"the connection broke: {str(error) or type(error).__name__}", was_made=True)


def _is_of_tls(error: httpx.ConnectError) -> bool:
    """Whether the peer is no server of TLS, or not the one that it must be: httpcore's error has ssl's as argument."""
    return error.__cause__ is not None and any(isinstance(part, ssl.SSLError) for part in error.__cause__.args)
