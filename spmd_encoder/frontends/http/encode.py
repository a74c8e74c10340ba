"""`POST /v1/encode`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from spmd_encoder.api.types import ItemOutcome
from spmd_encoder.frontends.base import check_model, check_output, item_name
from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.accept import preferred
from spmd_encoder.frontends.http.answer import HeldResponse, answer, take_request_id
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import Account
from spmd_encoder.frontends.http.exchange import exchange_of
from spmd_encoder.frontends.http.options import Encoding
from spmd_encoder.frontends.http.readers import read_request
from spmd_encoder.frontends.http.render import JSON_TYPE, Rendered, is_heavy, render_json
from spmd_encoder.frontends.http.render_safetensors import MEDIA_TYPE as SAFETENSORS_TYPE
from spmd_encoder.frontends.http.render_safetensors import render_safetensors


def encode_routes(backend: Backend) -> APIRouter:
    router = APIRouter()
    service, config = backend.service, backend.config

    @router.post(
        "/v1/encode",
        summary="Encode media to embeddings",
        response_model=schemas.EncodeReply,
        responses=schemas.ENCODE_ERRORS,
        openapi_extra=schemas.body_of(schemas.EncodeBody),
    )
    async def encode(request: Request) -> Response:
        exchange = exchange_of(request)
        request_id = take_request_id(request, exchange)
        with ExitStack() as held:
            account = Account(service, held)
            parsed = await read_request(request, backend, account)
            options = parsed.options
            if options.request_id is not None:
                exchange.request_id = request_id = options.request_id
            model = check_model(service, config.served_name, options.model)
            check_output(service, options.output)
            outcomes = await answer(
                request,
                backend,
                account,
                parsed.items,
                request_id=request_id,
                output=options.output,
                name=item_name,
            )
            exchange.note(outcomes)
            if preferred(request, (JSON_TYPE, SAFETENSORS_TYPE)) == SAFETENSORS_TYPE:
                rendered = render_safetensors(request_id, model, outcomes)
            else:
                rendered = await _as_json(request_id, model, outcomes, options.encoding, backend)
            return HeldResponse(rendered, held.pop_all())

    return router


async def _as_json(
    request_id: str, model: str, outcomes: Sequence[ItemOutcome], encoding: Encoding, backend: Backend
) -> Rendered:
    job = partial(render_json, request_id, model, outcomes, encoding)
    return await backend.run(job) if is_heavy(outcomes, encoding) else job()
