"""`POST /v1/encode` by content type: one raw file, options in the query, and what foreign web pages may not send."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from spmd_encoder.api.types import OutputKind
from spmd_encoder.config import Config
from spmd_encoder.frontends.http.app import create_app
from tests.harness.fake_service import FakeService, picture, picture_file

PICTURE = picture_file(5)
JSON = json.dumps({"items": [{"image": picture(5)}]}).encode()
FORM = b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n' + PICTURE + b"\r\n--b--\r\n"
FORM_TYPE = "multipart/form-data; boundary=b"
SERVER = replace(Config().server, max_body_bytes=20_000, max_image_bytes=5_000)


@pytest.fixture
def service() -> FakeService:
    return FakeService(max_inflight_bytes=2**20)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service, replace(Config(), server=SERVER)))
    async with httpx.AsyncClient(transport=transport, base_url="http://enc.test:30000") as client:
        yield client
    assert service.reserved == 0


async def send(
    client: httpx.AsyncClient, content: bytes, kind: str | None, query: str = "", **headers: str
) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if kind is not None:
        sent["content-type"] = kind
    return await client.post(f"/v1/encode{query}", content=content, headers=sent)


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "IMAGE/X-ANY; q=1", "application/octet-stream"])
async def test_one_raw_file(client: httpx.AsyncClient, service: FakeService, kind: str) -> None:
    reply = await send(client, PICTURE, kind)
    (entry,) = reply.json()["data"]
    assert (reply.status_code, entry["status"], entry["index"]) == (200, "ok", 0)
    assert entry["digest"] == "sha256:" + hashlib.sha256(PICTURE).hexdigest()
    query = "?output=tokens&encoding_format=float&request_id=my%20own&model=fake"
    reply = await send(client, PICTURE, kind, query)
    assert (reply.json()["id"], reply.json()["data"][0]["embedding"]) == ("my own", [5, 9])
    assert service.seen[-1].output is OutputKind.TOKENS


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "INVALID_REQUEST"),
        (b"secret", 415, "MEDIA_UNSUPPORTED"),
        (PICTURE[:20], 422, "MEDIA_CORRUPT"),
        (bytes(5_001), 413, "TOO_LARGE"),
        (bytes(20_001), 413, "TOO_LARGE"),
    ],
)
async def test_a_bad_raw_file(
    client: httpx.AsyncClient, service: FakeService, content: bytes, status: int, code: str
) -> None:
    reply = await send(client, content, "image/png")
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert "secret" not in reply.text
    assert service.seen == []


async def test_types_that_are_not_read(client: httpx.AsyncClient) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "model/obj",
        "multipart/mixed; boundary=b",
        "",
        "x",
    ):
        reply = await send(client, JSON, kind)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "MEDIA_UNSUPPORTED")
        assert "multipart/form-data" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(JSON, "application/json"), (FORM, FORM_TYPE), (PICTURE, "image/png")],
    ids=["json", "form", "raw"],
)
async def test_queries(client: httpx.AsyncClient, service: FakeService, content: bytes, kind: str) -> None:
    assert (await send(client, content, kind, "?output=tokens")).status_code == 200
    assert service.seen[-1].output is OutputKind.TOKENS
    for query, param in {
        "?colour=red": "colour",
        "?Output=tokens": "Output",
        "?output=best": "output",
        "?output=": "output",
        "?output=tokens&output=tokens": "output",
        "?request_id=%0a": "request_id",
        "?" + "&" * 50 + "x=1": None,
        "?" + "a=1&" * 50: None,
        "?output=%ff": None,
    }.items():
        reply = await send(client, content, kind, query)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "INVALID_REQUEST"), query
        assert reply.json()["error"]["param"] == param, query
    assert (await send(client, content, kind, "?model=gpt")).status_code == 404


async def test_an_option_is_given_once(client: httpx.AsyncClient) -> None:
    body = json.dumps({"items": [{"image": picture(5)}], "output": "tokens"}).encode()
    reply = await send(client, body, "application/json", "?output=tokens")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "output")


SAME = [
    {},
    {"sec_fetch_site": "same-origin", "origin": "https://behind.a.proxy"},
    {"sec_fetch_site": "none"},
    {"origin": "http://enc.test:30000"},
    {"origin": "HTTP://ENC.TEST:30000"},
    {"origin": "https://enc.test:30000"},
    {"origin": "http://enc.test", "host": "enc.test"},
    {"origin": "http://enc.test", "host": "enc.test:80"},
    {"origin": "https://enc.test", "host": "enc.test:443"},
    {"origin": "http://[::1]:30000", "host": "[::1]:30000"},
]
FOREIGN = [
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site", "origin": "http://enc.test:30000"},
    {"sec_fetch_site": "cross-site", "origin": "http://enc.test:30000"},
    {"sec_fetch_site": ""},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://enc.test"},
    {"origin": "http://enc.test:3000"},
    {"origin": "http://evil.test:30000"},
    {"origin": "http://enc.test:30000.evil.test"},
    {"origin": "http://enc.test:x", "host": "enc.test:x"},
    {"origin": "chrome-extension://enc.test", "host": "enc.test"},
    {"origin": "http://enc.test", "host": ""},
]
SENDABLE_BY_ANY_PAGE = [(FORM, FORM_TYPE), (JSON, None)]


@pytest.mark.parametrize(("content", "kind"), SENDABLE_BY_ANY_PAGE, ids=["form", "untyped"])
async def test_programs_and_own_pages_may_send(client: httpx.AsyncClient, content: bytes, kind: str | None) -> None:
    for headers in SAME:
        assert (await send(client, content, kind, **headers)).status_code == 200, headers


@pytest.mark.parametrize(("content", "kind"), SENDABLE_BY_ANY_PAGE, ids=["form", "untyped"])
async def test_pages_of_other_origins_may_not(
    client: httpx.AsyncClient, service: FakeService, content: bytes, kind: str | None
) -> None:
    for headers in FOREIGN:
        reply = await send(client, content, kind, **headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "CROSS_ORIGIN"), headers
        assert reply.headers["x-spmd-replica"] == "none"
        assert "access-control-allow-origin" not in reply.headers
    assert service.seen == []


async def test_two_headers_are_no_way_around(client: httpx.AsyncClient) -> None:
    for name, good, bad in (
        ("origin", "http://enc.test:30000", "http://evil.test"),
        ("sec-fetch-site", "same-origin", "cross-site"),
    ):
        for pair in ((good, bad), (bad, good)):
            headers = [("content-type", FORM_TYPE), *((name, value) for value in pair)]
            assert (await client.post("/v1/encode", content=FORM, headers=headers)).status_code == 403


async def test_other_types_need_a_preflight_which_is_not_granted(client: httpx.AsyncClient) -> None:
    """So a browser never sends them for a foreign page, and a proxy that grants them may pass them on."""
    asks = {"origin": "http://evil.test", "access-control-request-method": "POST"}
    reply = await client.options("/v1/encode", headers=asks | {"access-control-request-headers": "content-type"})
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]
    for content, kind in ((JSON, "application/json"), (PICTURE, "image/png")):
        assert (await send(client, content, kind, origin="http://evil.test")).status_code == 200
