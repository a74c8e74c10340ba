"""`POST /v1/lookup`, and items of `/v1/encode` that are digests alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from spmd_encoder.api.types import HeldResult, ItemFailure, ItemOutcome, MediaItem, Modality, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.digests import MAX_DIGESTS
from spmd_encoder.frontends.http.app import create_app
from tests.harness.fake_service import FakeService, picture, size_embedding

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
ROWS = HeldResult(kind=OutputKind.TOKENS, shape=(4, 2), dtype="bfloat16", num_tokens=4, grid=(1, 4, 4), replicas=(1, 0))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, Config())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
    assert service.reserved == 0


async def test_what_is_held_and_what_is_not(client: httpx.AsyncClient, service: FakeService) -> None:
    service.held = {A: ROWS}
    reply = await client.post("/v1/lookup", json={"digests": [B, A, A], "output": "tokens"})
    held = {
        "held": True,
        "replicas": [1, 0],
        "shape": [4, 2],
        "dtype": "bfloat16",
        "num_tokens": 4,
        "grid": [1, 4, 4],
        "digest": A,
    }
    nothing = dict.fromkeys(("shape", "dtype", "num_tokens", "grid"))
    assert reply.json() == {
        "model": "fake",
        "output": "tokens",
        "data": [
            {"index": 0, "digest": B, "held": False, "replicas": [], **nothing},
            {"index": 1, **held},
            {"index": 2, **held},
        ],
    }
    assert service.looked_up == [((B, A, A), OutputKind.TOKENS)]
    assert "server-timing" in reply.headers
    assert service.seen == []


async def test_the_output_is_the_models_own_where_none_is_said(client: httpx.AsyncClient, service: FakeService) -> None:
    for body in ({"digests": [A]}, {"digests": [A], "output": None}):
        assert (await client.post("/v1/lookup", json=body)).json()["output"] == "pooled"
    assert {output for _, output in service.looked_up} == {OutputKind.POOLED}


async def test_films_by_how_they_were_sampled(client: httpx.AsyncClient, service: FakeService) -> None:
    film = {"digests": [A], "modality": "video"}
    for body in ({"digests": [A]}, {"digests": [A], "fps": 2}, {**film}, {**film, "fps": 2}, {**film, "max_frames": 3}):
        assert (await client.post("/v1/lookup", json=body)).status_code == 200
    keys = [keys[0] for keys, _ in service.looked_up]
    assert keys[0] == keys[1] == A, "a picture is not sampled"
    assert len(set(keys)) == 4
    item = {"items": [{"digest": A, "modality": "video", "fps": 2}]}
    await client.post("/v1/encode", json=item)
    assert service.seen[0].items[0].key == keys[3], "the same words mean the same thing when it is encoded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "digests"),
        ({"digests": []}, "digests"),
        ({"digests": [A] * (MAX_DIGESTS + 1)}, "digests"),
        ({"digests": [A, "abc"]}, "digests[1]"),
        ({"digests": [A.upper()]}, "digests[0]"),
        ({"digests": [A + "\n"]}, "digests[0]"),
        ({"digests": [None]}, "digests[0]"),
        ({"digests": [A], "output": "both"}, "output"),
        ({"digests": [A], "items": []}, "items"),
    ],
)
async def test_what_is_no_look_up(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    reply = await client.post("/v1/lookup", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert reply.json()["error"]["param"] == param


async def test_other_refusals(client: httpx.AsyncClient, service: FakeService) -> None:
    good = {"digests": [A]}
    assert (await client.post("/v1/lookup", json={**good, "model": "gpt"})).status_code == 404
    assert (await client.post("/v1/lookup?output=tokens", json=good)).status_code == 400
    assert (await client.post("/v1/lookup", content=b"x", headers={"content-type": "text/plain"})).status_code == 415
    assert (await client.get("/v1/lookup")).status_code == 405
    service.model = None
    reply = await client.post("/v1/lookup", json=good)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "NOT_READY")


async def test_an_item_by_its_digest(client: httpx.AsyncClient, service: FakeService) -> None:
    def answer(item: MediaItem) -> ItemOutcome:
        if item.digest == B:
            return ItemFailure(error=EncoderError(ErrorCode.NOT_FOUND, "no cache holds it"))
        return size_embedding(item)

    service.answer = answer
    items = [{"digest": A}, {"digest": B}, {"image": picture(5)}, {"digest": C, "modality": "audio"}]
    reply = await client.post("/v1/encode", json={"items": items})
    assert reply.status_code == 200
    entries = reply.json()["data"]
    assert [entry["status"] for entry in entries] == ["ok", "error", "ok", "ok"]
    assert entries[1]["error"] == {
        "message": "no cache holds it",
        "type": "not_found_error",
        "param": "items[1]",
        "code": "NOT_FOUND",
    }
    sent = service.seen[0].items
    assert [(item.digest, item.held, item.data == b"", item.modality) for item in sent] == [
        (A, True, True, Modality.IMAGE),
        (B, True, True, Modality.IMAGE),
        (sent[2].digest, False, False, Modality.IMAGE),
        (C, True, True, Modality.AUDIO),
    ]
    reply = await client.post("/v1/encode", json={"items": [{"digest": B}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "NOT_FOUND")
