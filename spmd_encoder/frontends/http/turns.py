"""Who waits before the application is asked: many requests at once must not keep the event loop from the few that ask
how it is, or that register a receiver; nor may they wait without end, each with a connection."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from starlette.responses import Response

from spmd_encoder.api.service import EncoderService
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.errors import error_response, json_response
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.sglang.parts import EXPECTED_TIMES

# Begun in one turn of the event loop: some 2 ms each of parsing and admission, while everything else waits.
_AT_ONCE = 8
_SGLANG = "/encode"
_HEAVY = frozenset({"/v1/encode", "/v1/embeddings", _SGLANG})


class Turns:
    """Of one server and event loop. Requests that bring media are begun in the order of their coming, a few in each
    turn of the loop; all others at once. With `most` who wait, others are refused.

    SGLang's `/encode` only where as many wait as there may be parts that receivers wait for: what its body does not
    tell, since it is not read, its receivers hear from their own side, which has the status."""

    def __init__(self, most: int, service: EncoderService, metrics: HttpMetrics) -> None:
        self._most = most
        self._service = service
        self._metrics = metrics
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._is_going = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @staticmethod
    def waits(path: str) -> bool:
        return path in _HEAVY

    def refusal(self, path: str, method: str) -> Response | None:
        """What is answered where too many wait already: an ASGI application that costs nearly nothing."""
        if len(self._waiting) < self._most * (EXPECTED_TIMES if path == _SGLANG else 1):
            return None
        message = f"{len(self._waiting)} requests wait for their turn already (--max-queued-items); try again later"
        error = self._service.request_refused(EncoderError(ErrorCode.QUEUE_FULL, message))
        if path == _SGLANG:
            response = json_response(503, {"status": "error", "message": message, "req_id": None})
        else:
            response = error_response(error)
        response.headers["x-spmd-replica"] = "none"
        self._metrics.observe(path, method, response.status_code, 0.0)
        return response

    def wait(self, begin: Callable[[], None]) -> None:
        """Call `begin` when it is its turn."""
        self._waiting.append(begin)
        if not self._is_going:
            self._is_going = True
            asyncio.get_running_loop().call_soon(self._go)

    def _go(self) -> None:
        try:
            for _ in range(min(_AT_ONCE, len(self._waiting))):
                self._waiting.popleft()()
        finally:  # one that fails must not keep the others waiting for ever
            self._is_going = bool(self._waiting)
            if self._is_going:
                asyncio.get_running_loop().call_soon(self._go)
