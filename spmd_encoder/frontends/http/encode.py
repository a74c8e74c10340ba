"""`POST /v1/encode`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits, check_model, check_output, check_request_id, encode_items
from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.body import Timeouts, check_content_type, read_body
from spmd_encoder.frontends.http.exchange import Exchange, exchange_of
from spmd_encoder.frontends.http.parse import Encoding, parse_request
from spmd_encoder.frontends.http.render import Rendered, num_bytes, render

T = TypeVar("T")

# Replies below this are rendered at once: a change of threads costs more.
_INLINE_BYTES = {"base64": 64 * 1024, "float": 4 * 1024}


class HeldResponse(Response):
    """A reply that closes `held` (the account of its request's bytes) when it is sent, or cannot be."""

    def __init__(self, rendered: Rendered, held: ExitStack) -> None:
        super().__init__(rendered.body, rendered.status, rendered.headers, media_type="application/json")
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


def encode_routes(service: EncoderService, config: Config, pool: Executor, timeouts: Timeouts) -> APIRouter:
    router = APIRouter()
    limits = ItemLimits.of(config.server)
    parse = partial(parse_request, max_items=config.server.max_items_per_request, limits=limits)

    @router.post(
        "/v1/encode",
        summary="Encode media to embeddings",
        response_model=schemas.EncodeReply,
        responses=schemas.ENCODE_ERRORS,
        openapi_extra=schemas.body_of(schemas.EncodeBody),
    )
    async def encode(request: Request) -> Response:
        exchange = exchange_of(request)
        name = _take_request_id(request, exchange)
        check_content_type(request)
        loop = asyncio.get_running_loop()
        with ExitStack() as held:
            body = await read_body(request, service, held, max_bytes=config.server.max_body_bytes, timeouts=timeouts)
            parsed = await loop.run_in_executor(pool, parse, body)
            if parsed.request_id is not None:
                exchange.request_id = name = parsed.request_id
            model = check_model(service, config.served_name, parsed.model)
            check_output(service, parsed.output)
            work = encode_items(service, parsed.items, request_id=name, output=parsed.output)
            outcomes = await unless_gone(work, request.receive)
            exchange.note(outcomes)
            job = partial(render, name, model, outcomes, parsed.encoding)
            rendered = await _render(job, num_bytes(outcomes), parsed.encoding, pool)
            return HeldResponse(rendered, held.pop_all())

    return router


async def unless_gone(work: Coroutine[None, None, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled at once when the client disconnects.

    Raises `EncoderError` CANCELLED then, else what `work` raises. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EncoderError(ErrorCode.CANCELLED, "the client has gone")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _render(job: partial[Rendered], size: int, encoding: Encoding, pool: Executor) -> Rendered:
    if size <= _INLINE_BYTES[encoding]:
        return job()
    return await asyncio.get_running_loop().run_in_executor(pool, job)


def _take_request_id(request: Request, exchange: Exchange) -> str:
    """The header's id, or a new one, which every reply of this request then carries.

    Raises `EncoderError` INVALID_REQUEST for an id that may not be echoed.
    """
    given = request.headers.get("x-request-id")
    if given is not None:
        return check_request_id(given)
    exchange.request_id = f"enc-{uuid.uuid4().hex}"
    return exchange.request_id
