"""Reading a request's body within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request

from spmd_encoder.errors import EncoderError, ErrorCode, time_over
from spmd_encoder.frontends.account import Account
from spmd_encoder.frontends.http.errors import HttpError


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. `header_s` bounds a request's headers, `body_idle_s` the wait for more of a body, `body_total_s`
    a whole body, `reply_idle_s` the wait until a client has taken more of its reply, `keep_alive_s` an idle
    connection."""

    header_s: float = 30.0
    body_idle_s: float = 30.0
    body_total_s: float = 300.0
    reply_idle_s: float = 30.0
    keep_alive_s: float = 65.0


DEFAULT_TIMEOUTS = Timeouts()


async def body_chunks(
    request: Request, account: Account, *, max_bytes: int, timeouts: Timeouts, until: float = math.inf
) -> AsyncIterator[bytes]:
    """The body as it comes, each chunk accounted for.

    Raises `EncoderError` TOO_LARGE (before reading where the length is announced), OVERLOADED, or CANCELLED when
    the client goes, DEADLINE_EXCEEDED at `until` (the loop's time); `HttpError` 408 when it sends too slowly.
    """
    announced = _announced_length(request)
    _check_length(announced, max_bytes)
    account.expect(announced)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeouts.body_total_s
    received = 0
    more = True
    while more:
        try:
            async with asyncio.timeout_at(min(loop.time() + timeouts.body_idle_s, deadline, until)):
                message = await request.receive()
        except TimeoutError:
            if loop.time() >= until:
                raise time_over("receive") from None
            raise _too_slow(loop.time() >= deadline, timeouts) from None
        if message["type"] == "http.disconnect":
            raise EncoderError(ErrorCode.CANCELLED, "the client has gone")
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(chunk)
        _check_length(received, max_bytes)
        account.add(len(chunk))
        if chunk:
            yield chunk


async def read_body(chunks: AsyncIterator[bytes]) -> bytearray:
    """The whole body."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
    return body


def _announced_length(request: Request) -> int:
    text = request.headers.get("content-length", "0").strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the Content-Length header is not a number of bytes")
    return int(text)


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise EncoderError(
            ErrorCode.TOO_LARGE, f"the body has more bytes than the limit of {max_bytes} (--max-body-bytes)"
        )


def _too_slow(is_total: bool, timeouts: Timeouts) -> HttpError:
    if is_total:
        message = f"the body did not arrive within {timeouts.body_total_s:g} s"
    else:
        message = f"nothing more of the body arrived for {timeouts.body_idle_s:g} s"
    return HttpError(408, "REQUEST_TIMEOUT", message, close=True)
