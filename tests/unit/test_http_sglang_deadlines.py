"""How long the caller of SGLang's `/encode` wants to wait: `X-Request-Timeout`, as `/v1/encode` has it."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.fake_service import picture
from tests.harness.sglang_receiver import Receiver
from tests.harness.sglang_server import Served, check, config, ok, refused, serving

pytestmark = pytest.mark.timeout(60)


async def left_s(served: Served, wait_s: str | None) -> float:
    """What the encoder is told of the time of one request."""
    with Receiver() as receiver:
        encode = served.later(served.encode(wait_s=wait_s))
        await served.service.arrived.wait()
        ok(await served.register(receiver))
        ok(await encode)
    deadline_s = served.service.seen[-1].deadline_s
    assert deadline_s is not None
    return deadline_s


@pytest.mark.parametrize(("header", "most"), [(None, 50.0), ("20", 20.0), ("7.5", 7.5), ("100000", 50.0)])
async def test_it_shortens_what_the_server_grants(header: str | None, most: float) -> None:
    async with serving(config(request_timeout_s=50.0)) as served:
        assert most - 10 < await left_s(served, header) <= most


async def test_what_is_no_time_is_refused() -> None:
    async with serving(config()) as served:
        refused(await served.encode(wait_s="soon"), 400, "X-Request-Timeout", req_id=None)
        assert not served.service.seen


async def test_time_that_is_over_before_the_answer_of_the_encoder() -> None:
    async with serving(config()) as served:
        served.service.gate.clear()
        refused(await served.encode(wait_s="0.1"), 504, "the stage forward")
        served.service.gate.set()
        with Receiver() as late:  # the part itself is not at an end
            ok(await served.register(late))
            check(await late.message(), 3)


async def test_rows_wait_for_their_receivers_when_the_caller_waits_no_more() -> None:
    async with serving(config()) as served:
        refused(await served.encode(wait_s="0.1"), 504, "the stage delivery")
        with Receiver() as late:
            ok(await served.register(late))
            check(await late.message(), 3)
        await served.idle()


async def test_a_url_is_given_up_in_time() -> None:
    async with serving(config(allow_private_media_hosts=True)) as served:
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with silent:
            url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/x.png"
            refused(await served.encode("r_local_part_0", url, picture(3), wait_s="0.2"), 504, "the stage fetch")
        assert not served.service.seen
