"""`POST /v1/encode` in detail: shapes, statuses, limits and headers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from spmd_encoder.api.types import ItemOutcome, MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.frontends.http.errors import STATUS
from tests.harness.fake_service import MODEL, STARTING, FakeService, failing, picture, size_embedding

CONFIG = Config()
SERVER = replace(
    CONFIG.server, max_body_bytes=20_000, max_items_per_request=4, max_image_bytes=5_000, max_image_pixels=10_000
)


@pytest.fixture
def service() -> FakeService:
    return FakeService(max_inflight_bytes=2**20)


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, replace(CONFIG, server=SERVER))
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        app.framework.router.lifespan_context(app.framework),
    ):
        yield client
    assert service.reserved == 0


def body(*uris: str, **more: Any) -> dict[str, Any]:
    return {"items": [{"image": uri} for uri in uris], **more}


async def test_reply_shape(client: httpx.AsyncClient, service: FakeService) -> None:
    service.answer = failing(EncoderError(ErrorCode.MEDIA_CORRUPT, "bad"), width=6, replica=1)
    reply = await client.post("/v1/encode", json=body(picture(5), picture(6), output="pooled", request_id="mine"))
    assert reply.status_code == 200
    digest = service.seen[0].items[0].digest
    assert reply.json() == {
        "id": "mine",
        "model": "fake",
        "data": [
            {
                "index": 0,
                "status": "ok",
                "modality": "image",
                "shape": [2],
                "dtype": "float32",
                "grid": [1, 1, 1],
                "num_tokens": 1,
                "digest": digest,
                "embedding": base64.b64encode(np.array([5, 9], "<f4").tobytes()).decode(),
            },
            {
                "index": 1,
                "status": "error",
                "error": {
                    "message": "bad",
                    "type": "invalid_request_error",
                    "param": "items[1]",
                    "code": "MEDIA_CORRUPT",
                },
            },
        ],
    }
    headers = reply.headers
    assert headers["x-spmd-replica"] == "0,1"
    assert headers["x-request-id"] == "mine"
    assert re.fullmatch(
        r"total;dur=\d+\.\d\d, queue;dur=1.00, preprocess;dur=2.00, forward;dur=3.00, transfer;dur=0.00",
        headers["server-timing"],
    )
    assert service.seen[0].output is OutputKind.POOLED
    assert service.seen[0].request_id == "mine"


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_all_failed_has_the_first_ones_status(
    client: httpx.AsyncClient, service: FakeService, code: ErrorCode
) -> None:
    service.answer = failing(EncoderError(code, "bad", retry_after_s=2.5), width=6)
    reply = await client.post("/v1/encode", json=body(picture(6), "data:,"))
    assert reply.status_code == STATUS[code]
    assert reply.json()["error"] == reply.json()["data"][0]["error"]
    assert len(reply.json()["data"]) == 2
    assert ("retry-after" in reply.headers) == (STATUS[code] in (429, 503))
    service.refusal = EncoderError(code, "refused", retry_after_s=2.5)
    reply = await client.post("/v1/encode", json=body(picture(6)))
    assert reply.status_code == STATUS[code]
    assert set(reply.json()) == {"error"}
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["code"] == code
    assert reply.headers.get("retry-after") == ("3" if STATUS[code] in (429, 503) else None)
    assert reply.headers["x-spmd-replica"] == "none"


@pytest.mark.parametrize(
    ("content", "param", "says"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"\xff", None, "not JSON"),
        (b"[]", None, "object"),
        (b"{}", "items", "missing required field"),
        (b'{"items": []}', "items", "no item"),
        (b'{"items": {}}', "items", "array"),
        (b'{"items": [{"image": "data:,x"}, {"imag": 1}]}', "items[1].imag", "unknown field `imag`"),
        (b'{"items": [{}]}', "items[0]", "one of `image`, `audio` and `video`"),
        (b'{"items": [{"image": "x", "digest": "sha256:%s"}]}' % (b"a" * 64), "items[0]", "or a `digest`"),
        (b'{"items": [{"digest": "sha256:%s", "fps": 1}]}' % (b"a" * 64), "items[0]", "how a `video` is sampled"),
        (b'{"items": [{"digest": "sha256:%s"}]}' % (b"A" * 64), "items[0]", "a digest is"),
        (b'{"items": [{"digest": "md5:1"}]}', "items[0]", "a digest is"),
        (b'{"items": [{"image": "x", "modality": "image"}]}', "items[0]", "of what a `digest` is"),
        (b'{"items": [{"image": "x", "video": "y"}]}', "items[0]", "one of `image`, `audio` and `video`"),
        (b'{"items": [{"image": "x", "fps": 1}]}', "items[0]", "how a `video` is sampled"),
        (b'{"items": [{"video": "x", "fps": 0}]}', "items[0].fps", ">= 0.001"),
        (b'{"items": [{"video": []}]}', "items[0]", "no frames"),
        (b'{"items": [{"video": ["x"], "max_frames": 3}]}', "items[0]", "as it is"),
        (b'{"items": [{"video": ["data:,a", "http://h/x"]}]}', "items[0]", "frame 1: "),
        (b'{"items": [{"image": 5}]}', "items[0].image", "int"),
        (b'{"items": [{"image": "x"}], "colour": 1}', "colour", "unknown field `colour`"),
        (b'{"items": [{"image": "x"}], "output": "best"}', "output", "'best'; it is one of pooled, tokens"),
        (b'{"items": [{"image": "x"}], "encoding_format": "hex"}', "encoding_format", "it is one of base64, float"),
        (b'{"items": [{"image": "\\ud800"}]}', None, "surrogate"),
        (b'{"items": [{"image": "\\udc00"}]}', None, "surrogate"),
        (b'{"items": [{"image": "x"}]', None, "truncated"),
        (b'{"items": [{"image": "x"}], "request_id": ""}', "request_id", "1 to 128"),
        (json.dumps(body("x", request_id="x" * 129)).encode(), "request_id", "1 to 128"),
        (json.dumps(body("x", request_id="a\nb")).encode(), "request_id", "printable"),
        (b'{"items": ' + b"[" * 5000, None, ""),
        (b'{"' + b"k" * 9000 + b'": 1}', None, "unknown field"),
    ],
)
async def test_malformed(
    client: httpx.AsyncClient, service: FakeService, content: bytes, param: str | None, says: str
) -> None:
    reply = await client.post("/v1/encode", content=content)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "INVALID_REQUEST")
    assert says in error["message"]
    assert len(error["message"]) < 400
    assert param is None or error["param"] == param
    assert service.seen == []


async def test_content_types(client: httpx.AsyncClient) -> None:
    content = json.dumps(body(picture(5))).encode()
    for kind in (None, "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"):
        headers = {"content-type": kind} if kind else {}
        assert (await client.post("/v1/encode", content=content, headers=headers)).status_code == 200
    for headers in ({"content-type": "text/plain"}, {"content-encoding": "gzip"}):
        reply = await client.post("/v1/encode", content=content, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "MEDIA_UNSUPPORTED")


async def test_names_of_model_and_output(client: httpx.AsyncClient, service: FakeService) -> None:
    for name in (MODEL.name, CONFIG.served_name):
        assert (await client.post("/v1/encode", json=body(picture(5), model=name))).status_code == 200
    reply = await client.post("/v1/encode", json=body(picture(5), model="gpt"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    service.model = replace(MODEL, outputs=(OutputKind.TOKENS,))
    reply = await client.post("/v1/encode", json=body(picture(5), output="pooled"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "output")


async def test_limits_name_their_flag(client: httpx.AsyncClient, service: FakeService) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    too_large = {
        "--max-body-bytes": {"content": b" " * 20_001},
        "--max-items-per-request": {"json": body(*["x"] * 5)},
        "--max-image-bytes": {"json": body("data:;base64," + "AAAA" * 1667)},
        "--max-image-pixels": {"json": body(picture(101, 100))},
    }
    for name, what in [*too_large.items(), ("--max-body-bytes", {"content": chunks()})]:
        reply = await client.post("/v1/encode", **what)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "TOO_LARGE"), name
        assert name in reply.json()["error"]["message"]
    assert service.seen == []


async def test_a_body_is_accounted_for_until_the_reply(client: httpx.AsyncClient, service: FakeService) -> None:
    content = json.dumps(body(picture(5))).encode()
    during: list[int] = []

    def answer(item: MediaItem) -> ItemOutcome:
        during.append(service.reserved)
        return size_embedding(item)

    async def chunks() -> AsyncIterator[bytes]:
        yield content[:50]
        yield content[50:]

    service.answer = answer
    await client.post("/v1/encode", content=content)
    await client.post("/v1/encode", content=chunks())
    assert during == [len(content), 256 * 1024]
    service.max_inflight_bytes = 10
    for sent in (content, chunks()):
        reply = await client.post("/v1/encode", content=sent)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "OVERLOADED")
        assert "retry-after" in reply.headers


async def test_items_that_fail_here_are_counted_once(client: httpx.AsyncClient, service: FakeService) -> None:
    service.answer = failing(EncoderError(ErrorCode.WORKER_DIED, "died"), width=6)
    reply = await client.post("/v1/encode", json=body("data:,", picture(5), "data:;base64,AAAA", picture(6)))
    assert [entry["status"] for entry in reply.json()["data"]] == ["error", "ok", "error", "error"]
    assert service.refused == [ErrorCode.INVALID_REQUEST, ErrorCode.MEDIA_UNSUPPORTED]
    await client.post("/v1/encode", json=body("data:,"))
    await client.post("/v1/encode", content=b"{")
    assert len(service.refused) == 3


async def test_request_ids(client: httpx.AsyncClient) -> None:
    good = body(picture(5))
    reply = await client.post("/v1/encode", json=good, headers={"x-request-id": "from header"})
    assert reply.headers["x-request-id"] == reply.json()["id"] == "from header"
    reply = await client.post("/v1/encode", json=good)
    assert reply.headers["x-request-id"] == reply.json()["id"]
    reply = await client.post("/v1/encode", json=good | {"request_id": "b"}, headers={"x-request-id": "h"})
    assert reply.headers["x-request-id"] == reply.json()["id"] == "b"
    for bad in ("x" * 129, "\xe4"):
        reply = await client.post("/v1/encode", json=good, headers={"x-request-id": bad.encode("latin-1")})
        assert reply.status_code == 400
        assert "x-request-id" not in reply.headers
    reply = await client.post("/v1/encode", content=b"{", headers={"x-request-id": "kept"})
    assert reply.headers["x-request-id"] == "kept"


async def test_before_the_first_replica(client: httpx.AsyncClient, service: FakeService) -> None:
    service.state, service.model = STARTING, None
    reply = await client.post("/v1/encode", json=body(picture(5)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "NOT_READY")
    assert reply.headers["retry-after"] == "3"


async def test_media_and_faults_are_never_echoed(
    client: httpx.AsyncClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await client.post("/v1/encode", json=body("data:;base64,c2VjcmV0c2VjcmV0", "secret", "data:,secret"))
    assert "ecret" not in reply.text and "c2Vj" not in reply.text
    service.refusal = ZeroDivisionError("secret")
    reply = await client.post("/v1/encode", json=body(picture(5)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "INTERNAL")
    assert "secret" not in reply.text
    assert "ZeroDivisionError" in caplog.text
    assert reply.headers["x-spmd-replica"] == "none"
