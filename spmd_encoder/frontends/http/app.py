"""The FastAPI application: routes, error shapes and the envelope around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import Response

from spmd_encoder import __version__
from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.destinations import Destinations
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import DEFAULT_TIMEOUTS, Timeouts
from spmd_encoder.frontends.http.embeddings import embeddings_routes
from spmd_encoder.frontends.http.encode import encode_routes
from spmd_encoder.frontends.http.envelope import Envelope
from spmd_encoder.frontends.http.errors import HttpError, error_response, plain_error
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.http.profile import profile_routes
from spmd_encoder.frontends.http.sglang import sglang_routes
from spmd_encoder.frontends.http.staged import staged_routes
from spmd_encoder.frontends.http.status import status_routes
from spmd_encoder.frontends.remote import Fetcher
from spmd_encoder.frontends.sglang.dialect import SglangDialect
from spmd_encoder.frontends.shared import new_dialect, new_pool, new_resources
from spmd_encoder.media.fetch import MediaFetcher

_CODES = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}


def create_app(
    service: EncoderService,
    config: Config,
    *,
    pool: Executor | None = None,
    fetcher: Fetcher | None = None,
    metrics: HttpMetrics | None = None,
    dialect: SglangDialect | None = None,
    destinations: Destinations | None = None,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> FastAPI:
    """The application in front of `service`.

    `pool`, `fetcher`, `dialect` and `destinations` stay the caller's; without one the app makes its own and closes it
    when its lifespan ends.
    """
    owned = AsyncExitStack()
    if pool is None:
        pool = new_pool()
        owned.callback(pool.shutdown, wait=False, cancel_futures=True)
    if fetcher is None:
        fetcher = MediaFetcher(config.media)
        owned.push_async_callback(fetcher.close)
    metrics = metrics or HttpMetrics()
    resources = new_resources(config)
    if dialect is None:
        dialect = new_dialect(service, config, resources, pool=pool, fetcher=fetcher, registry=metrics.registry)
        owned.push_async_callback(dialect.close)
    if destinations is None:
        destinations = Destinations(config, resources, metrics.registry)
        owned.push_async_callback(destinations.close)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with owned:
            yield

    backend = Backend(
        service=service, config=config, pool=pool, fetcher=fetcher, destinations=destinations, timeouts=timeouts
    )
    # Its page at /docs takes its scripts from here and not from elsewhere: many servers have no way out.
    app = FastAPIOffline(
        title="spmd_encoder",
        version=__version__,
        summary="Multimodal encoder server",
        redoc_url=None,
        lifespan=lifespan,
    )
    app.include_router(encode_routes(backend))
    app.include_router(staged_routes(backend))
    app.include_router(embeddings_routes(backend))
    app.include_router(sglang_routes(backend, dialect))
    app.include_router(profile_routes(backend))
    app.include_router(status_routes(service, metrics, config))
    app.add_middleware(Envelope, metrics=metrics)
    app.add_exception_handler(EncoderError, _on_encoder_error)
    app.add_exception_handler(HttpError, _on_http_error)
    app.add_exception_handler(HTTPException, _on_framework_error)
    return app


async def _on_encoder_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EncoderError)
    return error_response(error)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    headers = {"connection": "close"} if error.close else None
    return plain_error(error.status, error.code, error.message, headers, param=error.param)


async def _on_framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    code = _CODES.get(status, "INVALID_REQUEST" if status < 500 else "INTERNAL")
    message = {
        404: "there is no such route; GET /docs lists them",
        405: f"{request.method} is not allowed on this route",
    }.get(status, error.detail)
    return plain_error(status, code, message, dict(error.headers or {}))
