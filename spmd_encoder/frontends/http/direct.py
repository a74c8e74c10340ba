"""A shorter way to the routes that take nothing but the request and give nothing but a response.

FastAPI asks for telemetry, passes middlewares of its own, matches a path with every route, solves dependencies and
validates the reply, whatever a route needs: a third of the front end's time in profiles. The routes
stay FastAPI's, which documents them and answers all that is not an exact match here, such as another method.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.http.errors import HttpError, error_response, http_error_response

Table: TypeAlias = dict[tuple[str, str], APIRoute]


def direct_routes(routers: Iterable[APIRouter]) -> Table:
    """The route of each method and path, of those that are simple enough."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    return {(method, route.path): route for route in routes if _is_simple(route) for method in route.methods or ()}


class DirectRoutes:
    """An ASGI application of the routes of `table`, without what is around them."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def has(self, scope: Scope) -> bool:
        return scope["type"] == "http" and (scope["method"], scope["path"]) in self._table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Only where it `has` the route."""
        route = self._table[scope["method"], scope["path"]]
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
