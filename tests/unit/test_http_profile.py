"""/start_profile and /stop_profile over a real server in front of a fake service."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.profiling import MAX_FORWARDS, MAX_FORWARDS_WITH_STACK, ProfileActivity, ProfileOptions
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.profile import read_options
from spmd_encoder.frontends.http.server import HttpFrontEnd
from spmd_encoder.frontends.sglang.refusal import RefusalError
from tests.harness.fake_service import FakeService

pytestmark = pytest.mark.timeout(30)


@dataclass
class Served:
    service: FakeService
    http: httpx.AsyncClient


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    service = FakeService()
    sock = socket.create_server(("127.0.0.1", 0))
    front_end = HttpFrontEnd(service, Config(), sock)
    task = asyncio.create_task(front_end.serve())
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        try:
            yield Served(service, http)
        finally:
            front_end.stop(1)
            await task


def asked(served: Served) -> ProfileOptions:
    (options,) = served.service.profiled
    assert isinstance(options, ProfileOptions)
    return options


async def test_all_options() -> None:
    async with serving() as served:
        body = {
            "output_dir": "/traces/x",
            "num_steps": 5,
            "activities": ["CPU", "gpu", "MEM"],
            "with_stack": True,
            "record_shapes": True,
            "profile_prefix": "run.1",
            "profile_by_stage": False,
            "merge_profiles": None,
            "start_step": 3,
        }
        reply = await served.http.post("/start_profile", json=body)
        options = asked(served)
        assert re.fullmatch(r"run\.1-\d+-[0-9a-f]{8}", options.name)
        assert options == ProfileOptions(
            name=options.name,
            output_dir="/traces/x",
            num_steps=5,
            activities=(ProfileActivity.CPU, ProfileActivity.GPU, ProfileActivity.MEM),
            with_stack=True,
            record_shapes=True,
        )
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/plain")
        assert reply.text.splitlines() == [
            f"Start profiling output_dir=/t profile_id={options.name}",
            "rank 0 (dp 0, tp 0): /t/0",
            "rank 1 (dp 1, tp 0): /t/1",
        ]
        assert served.service.reserved == 0


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_no_body_and_both_methods(method: str) -> None:
    async with serving() as served:
        reply = await served.http.request(method, "/start_profile")
        assert reply.status_code == 200
        options = asked(served)
        assert options == ProfileOptions(name=options.name)
        reply = await served.http.request(method, "/stop_profile")
        assert (reply.status_code, reply.text.splitlines()[0]) == (200, "Stop profiling output_dir=/t")
        assert served.service.profiled == [options, None]


async def test_a_get_with_a_body_and_null() -> None:
    async with serving() as served:
        await served.http.request("GET", "/start_profile", json={"num_steps": 1})
        await served.http.post("/start_profile", json=None, content=b"null")
        first, second = served.service.profiled
        assert (first and first.num_steps, second and second.num_steps) == (1, None)
        assert first and second and first.name != second.name


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID_REQUEST, 400),
        (ErrorCode.INTERNAL, 500),
        (ErrorCode.NOT_READY, 503),
        (ErrorCode.DEADLINE_EXCEEDED, 504),
    ],
)
async def test_ranks_that_failed_are_named(code: ErrorCode, status: int) -> None:
    async with serving() as served:
        first, second = served.service.profile_outcomes
        served.service.profile_outcomes = [first, replace(second, path="", code=code, message="no good")]
        for path in ("/start_profile", "/stop_profile"):
            reply = await served.http.post(path)
            assert reply.status_code == status
            assert "failed on 1 of 2 ranks" in reply.text
            assert reply.text.splitlines()[1:] == ["rank 0 (dp 0, tp 0): /t/0", "rank 1 (dp 1, tp 0): failed: no good"]
        served.service.profile_outcomes.append(replace(second, path="", code=ErrorCode.INVALID_REQUEST))
        assert (await served.http.post("/stop_profile")).status_code == max(status, 400)


async def test_a_service_that_refuses() -> None:
    async with serving() as served:
        served.service.refusal = EncoderError(ErrorCode.NOT_READY, "no replica yet")
        for path in ("/start_profile", "/stop_profile"):
            reply = await served.http.post(path)
            assert (reply.status_code, reply.text) == (503, "no replica yet\n")


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"activities": []}, 400, "activities"),
        ({"activities": ["CPU", "TPU"]}, 400, "CPU, GPU, MEM"),
        ({"num_steps": 0}, 400, "num_steps"),
        ({"num_steps": MAX_FORWARDS + 1}, 400, str(MAX_FORWARDS)),
        ({"num_steps": MAX_FORWARDS_WITH_STACK + 1, "with_stack": True}, 400, "with stacks"),
        ({"profile_prefix": "../x"}, 400, "profile_prefix"),
        ({"profile_prefix": ".hidden"}, 400, "profile_prefix"),
        ({"profile_prefix": "x" * 65}, 400, "profile_prefix"),
        ({"output_dir": ""}, 400, "output_dir"),
        ({"output_dir": "a\0b"}, 400, "output_dir"),
        ({"output_dir": "x" * 1025}, 400, "output_dir"),
        ({"num_steps": "5"}, 422, "num_steps"),
        ([1], 422, "options"),
        ({"output_dir": "x" * 70_000}, 413, "bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_options(body: Any, status: int, word: str) -> None:
    async with serving() as served:
        reply = await served.http.post("/start_profile", json=body)
        assert reply.status_code == status
        assert word in reply.text
        assert served.service.profiled == []
        assert served.service.reserved == 0


async def test_a_foreign_page_profiles_nothing() -> None:
    async with serving() as served:
        foreign = {"sec-fetch-site": "cross-site"}
        for path in ("/start_profile", "/stop_profile"):
            for method in ("GET", "POST"):
                assert (await served.http.request(method, path, headers=foreign)).status_code == 403
        text = {"content-type": "text/plain"}
        assert (await served.http.post("/start_profile", content=b"{}", headers=text)).status_code == 400
        assert served.service.profiled == []


@given(st.binary(max_size=60) | st.from_regex(rb'\{"(num_steps|profile_prefix|activities)": .{0,20}\}'))
def test_whatever_is_sent_is_options_or_refused(body: bytes) -> None:
    try:
        options = read_options(body)
    except RefusalError as refusal:
        assert refusal.status in (400, 422)
    else:
        assert re.fullmatch(r"[\w.-]{1,90}", options.name, re.ASCII)
        assert options.num_steps is None or 0 < options.num_steps <= options.limit()
