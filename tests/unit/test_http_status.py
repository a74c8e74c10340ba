"""The routes beside `/v1/encode`: health, models, info, metrics, documentation, unknown routes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from spmd_encoder.api.types import ReadyState
from spmd_encoder.config import Config
from spmd_encoder.frontends.http.app import create_app
from tests.harness.fake_service import READY, STARTING, FakeService, picture

GOOD = {"items": [{"image": picture(5)}]}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service, Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (READY, True),
        (replace(READY, replicas_ready=1), True),
        (STARTING, False),
        (replace(READY, draining=True), False),
        (replace(READY, ready=False, replicas_ready=0), False),
        (replace(READY, started=False, replicas_ready=1), False),
    ],
)
async def test_health(client: httpx.AsyncClient, service: FakeService, state: ReadyState, ready: bool) -> None:
    service.state = state
    assert (await client.get("/health/live")).status_code == 200
    reply = await client.get("/health/ready")
    assert reply.status_code == (200 if ready else 503)
    assert reply.json() == {"ready": ready, "replicas_ready": state.replicas_ready, "replicas": 2}
    reply = await client.get("/health")
    assert (reply.status_code, reply.content) == (200 if ready else 503, b"")
    assert reply.headers["x-spmd-replica"] == "none"


async def test_models_and_info(client: httpx.AsyncClient, service: FakeService) -> None:
    reply = (await client.get("/v1/models")).json()
    assert reply["object"] == "list"
    (model,) = reply["data"]
    assert (model["id"], model["object"], model["random_weights"]) == ("fake", "model", True)
    assert (model["dtype"], model["outputs"], model["embedding_dim"]) == ("float32", ["tokens", "pooled"], 2)
    assert model["embedding_dims"] == {"tokens": 2, "pooled": 2}
    assert (model["model_type"], model["family"]) == ("fake", "fake")
    assert (await client.get("/info")).json()["layout"] == {"dp_size": 2, "tp_size": 1}
    service.model = None
    reply = await client.get("/v1/models")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "NOT_READY")
    assert "retry-after" in reply.headers


async def test_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/encode", json=GOOD)
    await client.post("/v1/encode", content=b"{")
    await client.get("/nowhere/17")
    await client.request("BREW", "/health")
    text = (await client.get("/metrics")).text
    assert "fake_up 1.0" in text
    for labels, count in {
        'code="200",method="POST",route="/v1/encode"': 1,
        'code="400",method="POST",route="/v1/encode"': 1,
        'code="404",method="GET",route="unmatched"': 1,
    }.items():
        assert f"spmd_encoder_http_requests_total{{{labels}}} {count}.0" in text
    assert 'method="other"' in text and "BREW" not in text and "nowhere" not in text
    assert 'duration_seconds_count{method="POST",route="/v1/encode"} 2.0' in text
    assert "spmd_encoder_http_requests_in_flight 1.0" in text


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    reply = await client.get("/nowhere")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "NOT_FOUND")
    reply = await client.get("/v1/encode")
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert reply.headers["allow"] == "POST"
    assert reply.headers["x-spmd-replica"] == "none"
    assert "server-timing" in reply.headers


async def test_documentation(client: httpx.AsyncClient) -> None:
    """A page of this server, which may then send any type of body (`tests/contracts/test_openapi.py` has the rest)."""
    page = await client.get("/docs")
    assert page.status_code == 200
    assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(assets) >= 2
    for asset in assets:
        assert asset.startswith("/"), "a server without a way out has its documentation too"
        assert (await client.get(asset)).status_code == 200
    spec = (await client.get("/openapi.json")).json()
    for path in ("/v1/encode", "/v1/embeddings"):
        schema = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "$ref" not in str(schema)
    reply = spec["components"]["schemas"]["EncodeReply"]
    assert set(reply["properties"]) == {"id", "model", "data"}


def test_the_process_that_serves_needs_no_torch() -> None:
    script = (
        "import sys; from spmd_encoder.frontends.registry import FRONT_ENDS, load_front_end; "
        "[load_front_end(name) for name in FRONT_ENDS]; "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    script = "import sys; import spmd_encoder.frontends.registry; print('fastapi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
