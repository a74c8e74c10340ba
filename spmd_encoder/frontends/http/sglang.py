"""The routes of SGLang's encoder server, so that its language servers work unchanged; docs/sglang.md tells of them.

They are left out of the OpenAPI document, which describes this server's own interface.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.account import Account
from spmd_encoder.frontends.base import is_ready
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import body_chunks, read_body
from spmd_encoder.frontends.http.call import unless_gone
from spmd_encoder.frontends.http.content import BodyKind, body_kind
from spmd_encoder.frontends.http.deadline import header_timeout_s
from spmd_encoder.frontends.http.errors import STATUS, HttpError, json_response
from spmd_encoder.frontends.sglang.dialect import SglangDialect
from spmd_encoder.frontends.sglang.refusal import RefusalError
from spmd_encoder.frontends.sglang.requests import (
    Fields,
    echo_of,
    part_id_of,
    part_index_of,
    read_encode,
    read_fetch,
    read_fields,
    read_registration,
)
from spmd_encoder.transports.base import ParcelHeader
from spmd_encoder.transports.registry import push_backend

log = logging.getLogger(__name__)

# The others are a few words long.
_MAX_CONTROL_BYTES = 64 * 1024


def sglang_routes(backend: Backend, dialect: SglangDialect) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    push = push_backend(backend.config.sglang.encoder_transfer_backend)

    async def encode(request: Request, call: _SglangCall) -> object:
        wanted_s = header_timeout_s(request)
        deadline = math.inf if wanted_s is None else time.monotonic() + wanted_s
        media = ExitStack()
        try:
            account = backend.account(media)
            fields = await call.fields(account, backend.config.server.max_body_bytes, until=deadline)
            echo = echo_of(fields) if push.is_fetched else {}
            limits = backend.item_limits
            read = partial(read_encode, fields, push, max_items=backend.max_items, limits=limits, deadline=deadline)
            # The call is held nowhere here: its items must not outlive their account.
            work = dialect.encode(await backend.read(read, call.num_bytes), media, account.add)
        except BaseException:
            media.close()
            raise
        del fields, read
        header = await unless_gone(work, request.receive)
        return {**echo, **_sizes(header)} if push.is_fetched else None

    async def register(request: Request, call: _SglangCall) -> object:
        registration = read_registration(await call.control_fields(), push)
        work = dialect.register(registration.part_id, registration.receiver, registration.count)
        await unless_gone(work, request.receive)
        return None

    async def metadata(request: Request, call: _SglangCall) -> object:
        fields = await call.control_fields()
        part_id, part_idx = part_id_of(fields), part_index_of(fields)
        header = await unless_gone(dialect.sizes(part_id), request.receive)
        return {"req_id": part_id, "part_idx": part_idx, **_sizes(header)}

    async def send(request: Request, call: _SglangCall) -> object:
        fetch = read_fetch(await call.control_fields(), push)
        # To its end, also where the caller has gone: it may not be told earlier.
        await dialect.send(fetch.part_id, fetch.memory, fetch.count)
        return None

    routes = {"/encode": encode, "/scheduler_receive_url": register, "/scheduler_receive_meta_data": metadata}
    for path, handle in {**routes, "/send": send}.items():
        router.add_api_route(path, _endpoint(backend, handle), methods=["POST"])

    @router.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=200 if is_ready(backend.service.ready_state()) else 503)

    return router


class _SglangCall:
    """One request's body, of `num_bytes`. `req_id` is what an error's reply names, once it is known."""

    def __init__(self, request: Request, backend: Backend) -> None:
        self._request = request
        self._backend = backend
        self.num_bytes = 0
        self.req_id: str | None = None

    async def fields(self, account: Account, max_bytes: int, until: float = math.inf) -> Fields:
        """As `body_chunks` reads them. Raises `RefusalError`, `EncoderError` or `HttpError`."""
        body_kind(self._request, BodyKind.JSON)
        timeouts = self._backend.timeouts
        chunks = body_chunks(self._request, account, max_bytes=max_bytes, timeouts=timeouts, until=until)
        body = await read_body(chunks)
        self.num_bytes = len(body)
        fields = await self._backend.read(partial(read_fields, body), len(body))
        self.req_id = part_id_of(fields)
        return fields

    async def control_fields(self) -> Fields:
        """The same for a body that holds no media."""
        with ExitStack() as held:
            try:
                return await self.fields(self._backend.account(held), _MAX_CONTROL_BYTES)
            except EncoderError as error:
                if error.code is not ErrorCode.TOO_LARGE:
                    raise
                # That limit is no flag's.
                raise RefusalError(413, f"the body has more than {_MAX_CONTROL_BYTES} bytes") from None


def _sizes(header: ParcelHeader) -> dict[str, int]:
    return {
        "embedding_size": header.num_bytes,
        "embedding_len": header.rows,
        "embedding_dim": header.dim,
    }


_Handler = Callable[[Request, _SglangCall], Awaitable[object]]


def _endpoint(backend: Backend, handle: _Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        call = _SglangCall(request, backend)
        try:
            return json_response(200, await handle(request, call))
        except RefusalError as refusal:
            return _failed(refusal.status, refusal.message, call.req_id)
        except HttpError as error:
            return _failed(error.status, error.message, call.req_id, close=error.close)
        except EncoderError as error:  # of the body, before it is known what it asks for
            return _failed(STATUS[error.code], error.message, call.req_id)
        except asyncio.CancelledError:
            # The server ends: a client that hung up is an `EncoderError`.
            return _failed(503, "the server ended before this request was done", call.req_id)
        except Exception:
            log.exception("a request to %s failed unexpectedly", request.url.path)
            return _failed(500, "the server failed on this request; its log says why", call.req_id)

    return endpoint


def _failed(status: int, message: str, req_id: str | None, *, close: bool = False) -> Response:
    body = {"status": "error", "message": message, "req_id": req_id}
    return json_response(status, body, {"connection": "close"} if close else None)
