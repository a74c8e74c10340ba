"""Reading a request's body within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.requests import Request

from spmd_encoder.api.service import EncoderService
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.errors import HttpError

# A body is accounted for in steps of this size as it comes.
_RESERVE_STEP_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. `header_s` bounds a request's headers, `body_idle_s` the wait for more of a body, `body_total_s`
    a whole body, `keep_alive_s` an idle connection."""

    header_s: float = 30.0
    body_idle_s: float = 30.0
    body_total_s: float = 300.0
    keep_alive_s: float = 65.0


DEFAULT_TIMEOUTS = Timeouts()


def check_content_type(request: Request) -> None:
    """Raises `EncoderError` MEDIA_UNSUPPORTED unless the body is plain JSON.

    A missing type is taken as JSON. Types that a web page may send without asking (forms, text) are refused: this
    API may listen on a developer's loopback address.
    """
    given = request.headers.get("content-type", "application/json")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "the body must be sent as Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "a compressed body (Content-Encoding) is not supported")


async def read_body(
    request: Request, service: EncoderService, held: ExitStack, *, max_bytes: int, timeouts: Timeouts
) -> bytearray:
    """The whole body; its size stays reserved with `service` until `held` closes.

    Raises `EncoderError` TOO_LARGE (before reading where the length is announced), OVERLOADED, or CANCELLED when
    the client goes; `HttpError` 408 when it sends too slowly.
    """
    body = bytearray()
    announced = _announced_length(request)
    _check_length(announced, max_bytes)
    reserved = 0
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeouts.body_total_s
    more = True
    while more:
        now = loop.time()
        try:
            async with asyncio.timeout_at(min(now + timeouts.body_idle_s, deadline)):
                message = await request.receive()
        except TimeoutError:
            raise _too_slow(loop.time() >= deadline, timeouts) from None
        if message["type"] == "http.disconnect":
            raise EncoderError(ErrorCode.CANCELLED, "the client has gone")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        _check_length(len(body), max_bytes)
        while len(body) > reserved:
            # What came, not what was announced: a few idle senders of large promises must not shut out the others.
            step = min(_RESERVE_STEP_BYTES, announced - reserved) if announced > reserved else _RESERVE_STEP_BYTES
            held.enter_context(service.reserve(step))
            reserved += step
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
