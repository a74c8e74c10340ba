"""The middleware around every route: allowed hosts, headers of every reply, metrics, a 500 for what nobody caught."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import check_request_id
from spmd_encoder.frontends.exchange import Exchange
from spmd_encoder.frontends.http.errors import HttpError, error_response, http_error_response
from spmd_encoder.frontends.http.exchange import SCOPE_KEY
from spmd_encoder.frontends.http.hosts import HostRule
from spmd_encoder.frontends.http.metrics import HttpMetrics

log = logging.getLogger(__name__)


class Envelope:
    """Pure ASGI, so that a reply is neither copied nor delayed and a disconnect reaches the route."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, hosts: HostRule | None) -> None:
        self._app = app
        self._metrics = metrics
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(request_id=_given_id(scope))
        scope[SCOPE_KEY] = exchange
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *exchange.headers()]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            if self._hosts is not None:
                self._hosts.check(Headers(scope=scope).get("host"))
            await self._app(scope, receive, send_with_headers)
        except HttpError as refused:
            await http_error_response(refused)(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            # The drain's deadline has passed (a client that vanished cancels the route's work, not this task).
            if status:
                raise
            error = EncoderError(ErrorCode.DRAINING, "the server ended before this request was done")
            await error_response(error)(scope, receive, send_with_headers)
        except Exception:
            log.exception("a request to %s failed unexpectedly", _route(scope) or "an unknown route")
            if status:  # too late for another reply
                raise
            error = EncoderError(ErrorCode.INTERNAL, "the server failed on this request; its log says why")
            await error_response(error)(scope, receive, send_with_headers)
        finally:
            self._metrics.in_flight.dec()
            seconds = time.perf_counter() - exchange.started
            self._metrics.observe(_route(scope), scope["method"], status or 499, seconds)


def _given_id(scope: Scope) -> str | None:
    """The caller's request id where it may be echoed; a route that needs it valid checks by itself."""
    given = Headers(scope=scope).get("x-request-id")
    if given is None:
        return None
    try:
        return check_request_id(given)
    except EncoderError:
        return None


def _route(scope: Scope) -> str | None:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else None
