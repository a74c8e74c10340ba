"""The routes that tell how the server is: health, info, models, metrics."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from spmd_encoder.api.service import EncoderService
from spmd_encoder.api.types import ModelInfo
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.base import check_model, is_ready, known_model
from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.errors import json_response, model_not_found
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.http.openapi import NO_MODEL, UNAVAILABLE
from spmd_encoder.observability.sglang_names import sglang_text


def status_routes(service: EncoderService, metrics: HttpMetrics, config: Config) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health",
        summary="200 while requests are taken",
        response_class=Response,
        responses={503: {"description": "not ready"}},
    )
    async def health() -> Response:
        return Response(status_code=200 if is_ready(service.ready_state()) else 503)

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", summary="200 while the process answers", response_model=schemas.Live)
    async def live() -> Response:
        return json_response(200, {"live": True})

    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health/ready", response_model=schemas.Ready, responses={503: {"model": schemas.Ready}})
    async def ready() -> Response:
        state = service.ready_state()
        is_so = is_ready(state)
        body = {"ready": is_so, "replicas_ready": state.replicas_ready, "replicas": state.replicas}
        return json_response(200 if is_so else 503, body)

    @router.get("/info", summary="Configuration, layout, limits, versions and processes")
    async def info() -> Response:
        body = msgspec.json.encode(dict(service.info()), enc_hook=str)
        return Response(body, media_type="application/json")

    @router.get("/v1/models", response_model=schemas.ModelList, responses=UNAVAILABLE)
    async def models() -> Response:
        return json_response(200, {"object": "list", "data": [_model(known_model(service), started)]})

    # Many models' names have a slash.
    @router.get("/v1/models/{model_id:path}", response_model=schemas.Model, responses=NO_MODEL | UNAVAILABLE)
    async def model(model_id: str) -> Response:
        known = known_model(service)
        try:
            check_model(service, config.served_name, model_id)
        except EncoderError as error:
            raise model_not_found(error) from None
        return json_response(200, _model(known, started))

    @router.get("/metrics", summary="Prometheus text", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        text = service.metrics_text()
        separator = b"" if not text or text.endswith(b"\n") else b"\n"
        text += separator + metrics.text()
        if config.observability.metrics_names == "sglang":
            text += sglang_text(text.decode(), config.served_name)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _model(info: ModelInfo, created: int) -> dict[str, object]:
    return {
        "id": info.name,
        "object": "model",
        "created": created,
        "owned_by": "spmd_encoder",
        "model_type": info.model_type,
        "family": info.family,
        "random_weights": info.random_weights,
        "dtype": info.dtype,
        "outputs": list(info.outputs),
        "default_output": info.default_output,
        "embedding_dim": info.embedding_dim,
        "embedding_dims": {str(kind): dim for kind, dim in info.embedding_dims.items()},
        "modalities": list(info.modalities),
        "revision": info.revision,
    }
