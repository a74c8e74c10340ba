"""`POST /v1/encode`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from spmd_encoder.frontends.base import check_model, check_output, item_name
from spmd_encoder.frontends.destinations import Elsewhere
from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.accept import preferred
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.call import Call, respond
from spmd_encoder.frontends.http.openapi import ENCODE_REPLIES, ENCODE_REQUEST
from spmd_encoder.frontends.http.readers import ParsedRequest, read_encode_request
from spmd_encoder.frontends.http.render import JSON_TYPE, Rendered, render_delivered, render_json
from spmd_encoder.frontends.http.render_tensors import MEDIA_TYPE as SAFETENSORS_TYPE
from spmd_encoder.frontends.http.render_tensors import render_safetensors


def encode_routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/encode",
        summary="Encode media to embeddings",
        response_model=schemas.EncodeReply,
        responses=ENCODE_REPLIES,
        openapi_extra=ENCODE_REQUEST,
    )
    async def encode(request: Request) -> Response:
        return await respond(request, backend, _encode)

    return router


async def _encode(call: Call) -> Rendered:
    service, config = call.backend.service, call.backend.config
    parsed = await read_encode_request(call)
    options = parsed.options
    call.name_request(options.request_id)
    call.limit_time(None if options.deadline_ms is None else options.deadline_ms / 1000)
    model = check_model(service, config.served_name, options.model)
    if options.elsewhere is not None:
        return await _encode_elsewhere(call, parsed, options.elsewhere, model)
    check_output(service, options.output)
    outcomes = await call.outcomes(parsed.items, output=options.output, name=item_name)
    if preferred(call.request, (JSON_TYPE, SAFETENSORS_TYPE)) == SAFETENSORS_TYPE:
        return render_safetensors(call.request_id, model, outcomes)
    job = partial(render_json, call.request_id, model, outcomes, options.encoding)
    return await call.rendered(job, outcomes, options.encoding)


async def _encode_elsewhere(call: Call, parsed: ParsedRequest, to: Elsewhere, model: str) -> Rendered:
    """The embeddings go to `to`, and the reply is JSON that says so."""
    destinations = call.backend.destinations
    output = destinations.check(to, len(parsed.items), parsed.options.output)
    check_output(call.backend.service, output)
    outcomes = await call.outcomes(parsed.items, output=output, name=item_name)
    delivered = await call.delivery(destinations.deliver(to, outcomes, call.request_id))
    return render_delivered(call.request_id, model, delivered)
