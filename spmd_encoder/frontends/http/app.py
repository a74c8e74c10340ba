"""The FastAPI application: routes, error shapes and the envelope around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from spmd_encoder import __version__
from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.destinations import Destinations
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import DEFAULT_TIMEOUTS, Timeouts
from spmd_encoder.frontends.http.direct import DirectRoutes, direct_routes
from spmd_encoder.frontends.http.embeddings import embeddings_routes
from spmd_encoder.frontends.http.encode import encode_routes
from spmd_encoder.frontends.http.envelope import Envelope
from spmd_encoder.frontends.http.errors import HttpError, error_response, http_error_response, plain_error
from spmd_encoder.frontends.http.hosts import HostRule
from spmd_encoder.frontends.http.lookup import lookup_routes
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.http.openapi import ANY_ROUTE
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
    hosts: HostRule | None = None,
) -> Application:
    """The application in front of `service`.

    `pool`, `fetcher`, `dialect` and `destinations` stay the caller's; without one the app makes its own and closes it
    when its lifespan ends. Without `hosts` any Host header is taken.
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
        # They would be built from the Host header, which whoever asks has written.
        redirect_slashes=False,
        responses=ANY_ROUTE,
        lifespan=lifespan,
    )
    routers = (
        encode_routes(backend),
        lookup_routes(backend),
        staged_routes(backend),
        embeddings_routes(backend),
        sglang_routes(backend, dialect),
        profile_routes(backend),
        status_routes(service, metrics, config),
    )
    for router in routers:
        app.include_router(router)
    app.add_middleware(Envelope, metrics=metrics, hosts=hosts)
    app.add_exception_handler(EncoderError, _on_encoder_error)
    app.add_exception_handler(HttpError, _on_http_error)
    routes = [route for router in routers for route in router.routes]
    app.add_exception_handler(HTTPException, partial(_on_framework_error, routes))
    return Application(app, DirectRoutes(direct_routes(routers)), metrics, hosts)


class Application:
    """An ASGI application: `framework` has all routes; some are reached without it."""

    def __init__(self, framework: FastAPI, direct: DirectRoutes, metrics: HttpMetrics, hosts: HostRule | None) -> None:
        self.framework = framework
        self._direct = direct
        self._wrapped = Envelope(direct, metrics, hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._wrapped if self._direct.has(scope) else self.framework)(scope, receive, send)


async def _on_encoder_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EncoderError)
    return error_response(error)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return http_error_response(error)


async def _on_framework_error(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    code = _CODES.get(status, "INVALID_REQUEST" if status < 500 else "INTERNAL")
    message = {
        404: "there is no such route; GET /docs lists them",
        405: f"{request.method} is not allowed on this route",
    }.get(status, error.detail)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    # A path may have a route per method; the framework names the first one's.
    here = [route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    if status == 405 and here:
        headers["allow"] = ", ".join(sorted(method for route in here for method in route.methods or ()))
    return plain_error(status, code, message, headers)
