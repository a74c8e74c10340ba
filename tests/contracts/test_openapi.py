"""The HTTP interface keeps what `/openapi.json` says of it: schemathesis against a real server over a fake service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from spmd_encoder.config import Config
from spmd_encoder.errors import ErrorCode
from spmd_encoder.frontends.http.render_tensors import MEDIA_TYPE
from tests.harness.examples import examples, within
from tests.harness.fake_server import FakeServer, fake_server
from tests.harness.fake_service import picture, picture_file

pytestmark = within(120)

GET = ["/health", "/health/live", "/health/ready", "/info", "/metrics", "/v1/models"]
MODEL, STAGED = "/v1/models/{model_id}", "/v1/staged/{staged_id}"
POST = ["/v1/encode", "/v1/embeddings", "/v1/lookup"]
EVERY = {"405", "421", "431"}
"""What any route may answer."""
FORMS = {"multipart/form-data", "image/*", "audio/*", "video/*", "application/octet-stream", "application/json"}
# Nothing is fetched but from a host that does not exist, and nothing is pushed but to one.
CONFIG = replace(
    Config(),
    media=replace(Config().media, allowed_media_domains=("media.invalid",)),
    destinations=replace(Config().destinations, push_allowed_hosts=("receiver.invalid",)),
)
FILES = st.sampled_from([picture_file(5), picture_file(40, 30), b"", b"GIF89a", picture_file(5)[:30], b"secret"])
TEXTS = st.sampled_from(
    [
        *(
            picture(5),
            picture(40, 30),
            "data:,",
            "data:;base64,AAAA",
            "http://127.0.0.1/",
            "https://media.invalid/a.png",
        ),
        *("file:///etc/hostname", "a photo", "", "ftp://a/b"),
    ]
)


def no_failure_of_ours(ctx: Any, response: Any, case: Any) -> bool | None:
    """That the time was over is its caller's own limit: the server's is longer than a test waits."""
    if response.status_code == 504 and response.json()["error"]["code"] == ErrorCode.DEADLINE_EXCEEDED:
        return None
    return not_a_server_error(ctx, response, case)


KEPT = [
    no_failure_of_ours,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def schema(server: FakeServer) -> Any:
    """With files and texts of which some are pictures; schemathesis alone would never make one."""
    for media_type in FORMS - {"multipart/form-data", "application/json"}:
        schemathesis.openapi.media_type(media_type, FILES)
    schemathesis.openapi.format("binary", FILES)
    schemathesis.openapi.format("uri", TEXTS)
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def statuses_of(operation: Any, mode: GenerationMode, num_examples: int, headers: dict[str, str]) -> set[int]:
    """The statuses of what was answered; every answer was as declared."""
    seen: set[int] = set()

    @examples(num_examples, database=None, suppress_health_check=[*HealthCheck])
    @given(case=operation.as_strategy(generation_mode=mode))
    def every_answer_is_declared(case: Any) -> None:
        seen.add(case.call_and_validate(headers=headers, checks=KEPT, timeout=20).status_code)

    every_answer_is_declared()
    return seen


@pytest.mark.hypothesis
@pytest.mark.parametrize("path", GET)
def test_what_tells_how_the_server_is(schema: Any, path: str) -> None:
    assert statuses_of(schema[path]["GET"], GenerationMode.POSITIVE, 3, {}) == {200}


@pytest.mark.hypothesis
def test_a_model_by_its_name(schema: Any) -> None:
    assert 404 in statuses_of(schema[MODEL]["GET"], GenerationMode.POSITIVE, 20, {})


def test_what_any_route_may_answer_is_as_declared(server: FakeServer, schema: Any) -> None:
    spec = httpx.get(f"{server.url}/openapi.json").json()
    for path, operations in spec["paths"].items():
        assert all(set(operation["responses"]) >= EVERY for operation in operations.values()), path
    for path in ("/health", "/health/live", "/v1/encode"):
        operation = schema[path]["GET" if "health" in path else "POST"]
        url, replies = f"{server.url}{path}", []
        replies.append(httpx.request("PATCH", url))
        replies.append(httpx.get(url, headers={"host": "evil.test"}))
        replies.append(httpx.get(url, headers={"x-long": "a" * 100_000}))
        assert [reply.status_code for reply in replies] == [405, 421, 431]
        for reply in replies:
            operation.validate_response(reply)


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("accept", ["*/*", MEDIA_TYPE])
def test_encode(schema: Any, mode: GenerationMode, accept: str) -> None:
    seen = statuses_of(schema["/v1/encode"]["POST"], mode, 100, {"accept": accept})
    assert 400 in seen
    assert mode is GenerationMode.NEGATIVE or 200 in seen


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_embeddings(schema: Any, mode: GenerationMode) -> None:
    seen = statuses_of(schema["/v1/embeddings"]["POST"], mode, 100, {})
    assert 400 in seen
    assert mode is GenerationMode.NEGATIVE or 200 in seen


@pytest.mark.hypothesis
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_lookup(schema: Any, mode: GenerationMode) -> None:
    seen = statuses_of(schema["/v1/lookup"]["POST"], mode, 50, {})
    assert (200 if mode is GenerationMode.POSITIVE else 400) in seen


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("method", "mode"),
    [("GET", GenerationMode.POSITIVE), ("GET", GenerationMode.NEGATIVE), ("DELETE", GenerationMode.POSITIVE)],
)
def test_staged(schema: Any, method: str, mode: GenerationMode) -> None:
    seen = statuses_of(schema[STAGED][method], mode, 30, {})
    assert seen <= {400, 404}, "nobody guesses an id"


def test_staged_ids_that_are_known(schema: Any, server: FakeServer) -> None:
    for method, status in (("GET", 200), ("DELETE", 204)):
        body = {"items": [{"image": picture(5)}], "destination": {"type": "staged"}}
        reply = httpx.post(f"{server.url}/v1/encode", json=body)
        staged_id = reply.json()["data"][0]["delivered"]["staged_id"]
        case = schema[STAGED][method].Case(path_parameters={"staged_id": staged_id})
        assert case.call_and_validate(checks=KEPT, timeout=20).status_code == status


def test_the_document_tells_of_everything(server: FakeServer) -> None:
    spec = httpx.get(f"{server.url}/openapi.json").json()
    assert set(spec["paths"]) == {*GET, *POST, MODEL, STAGED}
    assert set(spec["paths"][STAGED]) == {"get", "delete"}
    assert set(spec["paths"][STAGED]["get"]["responses"]["200"]["content"]) == {MEDIA_TYPE, "application/octet-stream"}
    encode = spec["paths"]["/v1/encode"]["post"]
    assert set(encode["requestBody"]["content"]) == FORMS
    assert {p["name"] for p in encode["parameters"] if p["in"] == "query"} == {
        *("output", "encoding_format", "request_id", "model", "destination", "fps", "max_frames", "deadline_ms")
    }
    assert set(encode["responses"]["200"]["content"]) == {"application/json", MEDIA_TYPE}
    for path in POST:
        responses = spec["paths"][path]["post"]["responses"]
        statuses = {*("200", "400", "403", "404", "408", "413", "415", "422", "429", "500", "502", "503", "504")}
        statuses -= {"422", "429", "502"} if path == "/v1/lookup" else set()
        assert set(responses) == statuses | EVERY
        assert all("x-spmd-replica" in reply["headers"] for reply in responses.values())
        assert all("retry-after" in responses[status]["headers"] for status in {"429", "503"} & statuses)
        headers = {p["name"] for p in spec["paths"][path]["post"]["parameters"] if p["in"] == "header"}
        assert headers == {"x-request-id", "x-request-timeout"}
