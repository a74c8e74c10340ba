"""The shorter way to a route: the same answers as FastAPI's own, and only for routes that need nothing of it."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI, Request
from httpx import ASGITransport, AsyncClient
from starlette.responses import PlainTextResponse, Response

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.app import Application
from spmd_encoder.frontends.http.direct import DirectRoutes, direct_routes
from spmd_encoder.frontends.http.metrics import HttpMetrics


def router() -> APIRouter:
    made = APIRouter()

    @made.post("/plain")
    async def plain(request: Request) -> Response:
        if await request.body() == b"bad":
            raise EncoderError(ErrorCode.INVALID_REQUEST, "no good")
        return PlainTextResponse("direct" if "router" not in request.scope else "routed")

    @made.get("/value")
    async def value(request: Request) -> dict[str, str]:
        return {"path": request.url.path}

    @made.get("/in/{part}")
    async def part(request: Request, part: str) -> Response:
        return PlainTextResponse(part)

    @made.get("/needs")
    async def needs(request: Request, given: str = Depends(lambda: "x")) -> Response:
        return PlainTextResponse(given)

    @made.get("/nothing")
    async def nothing() -> Response:
        return PlainTextResponse("n")

    return made


def client() -> AsyncClient:
    framework = FastAPI()
    routes = router()
    framework.include_router(routes)
    app = Application(framework, DirectRoutes(direct_routes([routes])), HttpMetrics(), None)
    return AsyncClient(transport=ASGITransport(app), base_url="http://test")


def test_only_routes_that_take_the_request_alone_and_give_a_response() -> None:
    assert set(direct_routes([router()])) == {("POST", "/plain")}


async def test_what_matches_goes_past_the_framework_and_all_else_through_it() -> None:
    async with client() as http:
        assert (await http.post("/plain")).text == "direct"
        refused = await http.post("/plain", content=b"bad")
        assert refused.status_code == 400 and refused.json()["error"]["message"] == "no good"
        assert (await http.get("/plain")).status_code == 405
        assert (await http.post("/plain/")).status_code in (307, 404)
        assert (await http.get("/value")).json() == {"path": "/value"}
        assert [(await http.get(path)).text for path in ("/in/a", "/needs", "/nothing")] == ["a", "x", "n"]


async def test_it_stands_in_the_documentation() -> None:
    async with client() as http:
        assert "/plain" in (await http.get("/openapi.json")).json()["paths"]
