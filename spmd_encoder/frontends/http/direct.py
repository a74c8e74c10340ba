"""A shorter way to the routes that take nothing but the request and give nothing but a response.

FastAPI matches a path with every route, solves dependencies and validates the reply, whatever a route needs: some 30 %
of the front end's time in a profile. The routes stay FastAPI's, which documents them and answers all that is not an
exact match here, such as another method.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.http.errors import HttpError, error_response, http_error_response

Table: TypeAlias = dict[tuple[str, str], APIRoute]


def direct_routes(routers: Iterable[APIRouter]) -> Table:
    """The route of each method and path, of those that are simple enough."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return {(method, route.path): route for route in routes if _is_simple(route) for method in route.methods or ()}


class DirectRoutes:
    """ASGI middleware; what is not in `table` goes on to `app`."""

    def __init__(self, app: ASGIApp, table: Table) -> None:
        self._app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._table.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response: Response
        try:
            response = await route.endpoint(Request(scope, receive, send))
        except EncoderError as error:
            response = error_response(error)
        except HttpError as error:
            response = http_error_response(error)
        await response(scope, receive, send)


def _is_simple(route: APIRoute) -> bool:
    needs = route.dependant
    others = (needs.path_params, needs.query_params, needs.header_params, needs.cookie_params, needs.body_params)
    return (
        needs.request_param_name == "request"
        and not any((*others, needs.dependencies, route.dependencies))
        and route.endpoint.__annotations__.get("return") in ("Response", Response)
    )
