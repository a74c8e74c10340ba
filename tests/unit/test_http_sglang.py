"""SGLang's routes over a real server, with real PULL sockets as receivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from spmd_encoder.api.types import OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.fake_service import picture
from tests.harness.sglang_receiver import Receiver
from tests.harness.sglang_server import Served, check, config, ok, refused, serving

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The default backend, zmq_to_scheduler."""
    async with serving(config()) as served:
        yield served


@pytest.fixture
async def to_tokenizer() -> AsyncIterator[Served]:
    async with serving(config(encoder_transfer_backend="zmq_to_tokenizer")) as served:
        yield served


# -- zmq_to_tokenizer


async def test_to_the_tokenizer_before_the_reply(to_tokenizer: Served) -> None:
    with Receiver() as receiver:
        ok(await to_tokenizer.encode("r_local_part_0", picture(3), picture(5), embedding_port=receiver.port))
        check(await receiver.message(), 3, 5)
        assert await receiver.nothing_more()
    (request,) = to_tokenizer.service.seen
    assert (request.output, request.request_id) == (OutputKind.TOKENS, "r_local_part_0")
    await to_tokenizer.idle()


async def test_to_a_tokenizer_on_ipv6(to_tokenizer: Served) -> None:
    with Receiver(host="::1") as receiver:
        for host in ("::1", "[::1]"):
            ok(await to_tokenizer.encode("r_local_part_0", embedding_port=receiver.port, prefill_host=host, part_idx=1))
            check(await receiver.message(), 3)
            break


async def test_a_tokenizer_that_is_gone_is_a_502(to_tokenizer: Served) -> None:
    with Receiver() as receiver:
        port = receiver.port
    refused(await to_tokenizer.encode(embedding_port=port), 502, f"127.0.0.1:{port}", "cannot be reached")
    await to_tokenizer.idle()


async def test_backends_that_do_not_fit_are_named(to_tokenizer: Served) -> None:
    refused(await to_tokenizer.encode(), 400, "embedding_port", "zmq_to_tokenizer")
    with Receiver() as receiver:
        refused(await to_tokenizer.register(receiver), 400, "zmq_to_tokenizer")


async def test_a_list_of_ports_is_a_copy_each(served: Served) -> None:
    with Receiver() as one, Receiver() as two:
        ok(await served.encode(embedding_port=[one.port, two.port]))
        check(await one.message(), 3)
        check(await two.message(), 3)
        refused(await served.register(one), 400, "embedding_port")


# -- zmq_to_scheduler: who comes first


async def test_registrations_before_the_request(served: Served) -> None:
    with Receiver() as one, Receiver() as two:
        early = [served.later(served.register(one, count=2)), served.later(served.register(two, count=2))]
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        ok(await served.encode())
        for reply in early:
            ok(await reply)
        check(await one.message(), 3)
        check(await two.message(), 3)
        assert await one.nothing_more() and await two.nothing_more()
    await served.idle()


async def test_registrations_while_it_is_encoded_and_after(served: Served) -> None:
    served.service.gate.clear()
    with Receiver() as during, Receiver() as after:
        encode = served.later(served.encode())
        await served.service.arrived.wait()
        ok(await served.register(during, count=2))
        served.service.gate.set()
        check(await during.message(), 3)
        assert not encode.done()
        ok(await served.register(during, count=2))  # said twice, sent once
        ok(await served.register(after, count=2))
        ok(await encode)
        check(await after.message(), 3)
        ok(await served.register(after, count=2))
        assert await during.nothing_more() and await after.nothing_more()
    await served.idle()


async def test_registrations_do_not_wait_for_encodes(served: Served) -> None:
    """Hundreds of encodes are stuck; to register takes no notice."""
    served.service.gate.clear()
    encodes = [served.later(served.encode(f"r{n}")) for n in range(300)]
    while len(served.service.seen) < 300:
        await asyncio.sleep(0.01)
    with Receiver() as receiver:
        for n in range(300):
            ok(await served.register(receiver, f"r{n}"))
        assert (await served.http.get("/health")).status_code == 200
        served.service.gate.set()
        for encode in encodes:
            ok(await encode)
        assert {(await receiver.message()).head.req_id for _ in range(300)} == {f"r{n}" for n in range(300)}


async def test_receivers_that_contradict(served: Served) -> None:
    served.service.gate.clear()
    with Receiver() as one, Receiver() as two:
        encode = served.later(served.encode())
        await served.service.arrived.wait()
        ok(await served.register(one, count=1))
        refused(await served.register(two, count=2), 400, "receive_count")
        refused(await served.register(two, count=1), 400, "all 1 receivers")
        served.service.gate.set()
        ok(await encode)
        assert await two.nothing_more(1)


# -- the other routes


async def test_metadata_waits_for_the_rows(served: Served) -> None:
    served.service.gate.clear()
    ask: Callable[[str], Any] = lambda part_id: served.http.post(  # noqa: E731
        "/scheduler_receive_meta_data", json={"req_id": part_id, "part_idx": 1}
    )
    before = served.later(ask("r_local_part_0"))
    while not served.front_end.shared.dialect.num_parts:
        await asyncio.sleep(0.01)
    with Receiver() as receiver:
        encode = served.later(served.encode("r_local_part_0", picture(3), picture(5), embedding_port=receiver.port))
        await served.service.arrived.wait()
        during = served.later(ask("r_local_part_0"))
        served.service.gate.set()
        await encode
        want = {"req_id": "r_local_part_0", "part_idx": 1, "embedding_size": 64, "embedding_len": 8, "embedding_dim": 2}
        for reply in (await before, await during, await ask("r_local_part_0")):
            assert (reply.status_code, reply.json()) == (200, want)
    served.service.refusal = EncoderError(ErrorCode.INTERNAL, "broken")
    refused(await served.encode("bad"), 500, req_id="bad")
    refused(await ask("bad"), 500, "broken", req_id="bad")


async def test_send_names_the_backend(served: Served) -> None:
    reply = await served.http.post("/send", json={"req_id": "r", "session_id": "s", "buffer_address": 1})
    refused(reply, 400, "mooncake", "zmq_to_scheduler", req_id="r")


async def test_health_generate_says_what_health_says(served: Served) -> None:
    for ready, status in ((True, 200), (False, 503)):
        served.service.state = replace(served.service.state, ready=ready)
        assert (await served.http.get("/health_generate")).status_code == status
        assert (await served.http.get("/health")).status_code == status


async def test_transfers_are_measured(served: Served) -> None:
    with Receiver() as receiver:
        await served.encode(embedding_port=receiver.port)
    text = (await served.http.get("/metrics")).text
    assert 'spmd_encoder_transfer_seconds_count{backend="zmq_to_scheduler",outcome="ok"} 1.0' in text


async def test_the_end_of_the_server_is_told_to_all(served: Served) -> None:
    with Receiver() as receiver:
        early = served.later(served.register(receiver, "never"))
        waiting = served.later(served.encode("staged"))
        while not served.front_end.shared.dialect.staged_bytes:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver, "staged", count=2))
        check(await receiver.message(), 3, req_id="staged")
        served.service.gate.clear()
        encoding = served.later(served.encode("encoding"))
        while len(served.service.seen) < 2:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver, "encoding"))
        served.front_end.stop(0.2)
        for call, req_id in ((early, "never"), (waiting, "staged"), (encoding, "encoding")):
            refused(await call, 503, req_id=req_id)
        head = (await receiver.message()).head
        assert (head.req_id, head.error_code) == ("encoding", 503)


def test_every_code_has_a_status() -> None:
    from spmd_encoder.frontends.sglang.refusal import STATUS

    assert set(STATUS) == set(ErrorCode)
