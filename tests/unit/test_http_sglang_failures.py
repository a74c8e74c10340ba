"""What goes wrong around a part: failures, duplicates, callers that are lost, too much at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.sglang.parts import Phase
from tests.harness.fake_service import failing, picture
from tests.harness.sglang_receiver import Receiver
from tests.harness.sglang_server import Served, check, config, ok, refused, serving

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The default backend, zmq_to_scheduler."""
    async with serving(config()) as served:
        yield served


# -- failures


async def test_an_error_reaches_every_rank_whenever_it_registers(served: Served) -> None:
    served.service.answer = failing(EncoderError(ErrorCode.WORKER_DIED, "it died twice"), width=4)
    served.service.gate.clear()
    with Receiver() as one, Receiver() as two, Receiver() as three:
        early = served.later(served.register(one, count=3))
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        encode = served.later(served.encode("r_local_part_0", picture(3), picture(4)))
        await served.service.arrived.wait()
        ok(await early)
        ok(await served.register(two, count=3))
        served.service.gate.set()
        message = refused(await encode, 500, "mm_items[1]", "it died twice")
        ok(await served.register(three, count=3))
        for receiver in (one, two, three):
            got = await receiver.message()
            assert (got.head.error_msg, got.head.error_code, got.rows) == (message, 500, None)
            assert (got.head.req_id, got.head.part_idx) == ("r_local_part_0", 1)
            assert await receiver.nothing_more(20)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.QUEUE_FULL, 503),
        (ErrorCode.NOT_READY, 503),
        (ErrorCode.DRAINING, 503),
        (ErrorCode.DEADLINE_EXCEEDED, 504),
        (ErrorCode.INTERNAL, 500),
    ],
)
async def test_what_the_service_refuses(served: Served, code: ErrorCode, status: int) -> None:
    served.service.refusal = EncoderError(code, "not now")
    refused(await served.encode(), status, "not now")
    with Receiver() as late:
        ok(await served.register(late))
        assert (await late.message()).head.error_code == status


async def test_an_error_without_words_is_an_error(served: Served) -> None:
    served.service.refusal = EncoderError(ErrorCode.INTERNAL, "")
    message = refused(await served.encode(), 500)
    assert message
    with Receiver() as late:
        await served.register(late)
        assert (await late.message()).head.error_msg == message


async def test_a_fault_of_the_server(served: Served) -> None:
    served.service.refusal = RuntimeError("secret")
    message = refused(await served.encode(), 500)
    assert "secret" not in message


async def test_a_failure_may_be_tried_again(served: Served) -> None:
    served.service.refusal = EncoderError(ErrorCode.QUEUE_FULL, "full")
    refused(await served.encode(), 503)
    served.service.refusal = None
    encode = served.later(served.encode())
    while len(served.service.seen) < 2:
        await asyncio.sleep(0.01)
    with Receiver() as receiver:
        ok(await served.register(receiver))
        ok(await encode)
        check(await receiver.message(), 3)


async def test_a_rank_that_is_gone_fails_the_part_and_the_others_have_it(served: Served) -> None:
    with Receiver() as gone:
        url = gone.url
    served.service.gate.clear()
    encode = served.later(served.encode())
    await served.service.arrived.wait()
    with Receiver() as good:
        body = {"req_id": "r_local_part_0", "receive_count": 2, "receive_url": url}
        ok(await served.http.post("/scheduler_receive_url", json=body))
        ok(await served.register(good, count=2))
        served.service.gate.set()
        refused(await encode, 502, url)
        check(await good.message(), 3)
        assert await good.nothing_more(50), "one message for a part, not an error after its rows"
    await served.idle()


async def test_missing_registrations_end_in_time() -> None:
    async with serving(config(send_timeout_s=0.5)) as served:
        with Receiver() as one:
            encode = served.later(served.encode())
            await served.service.arrived.wait()
            ok(await served.register(one, count=2))
            refused(await encode, 504, "1 of 2 receivers have registered", "--send-timeout-s")
            check(await one.message(), 3)
        refused(await served.encode("other"), 504, "no receiver has registered", req_id="other")
        await served.idle()
        while served.front_end.shared.dialect.num_parts:
            await asyncio.sleep(0.05)


async def test_registrations_without_a_request_end_and_are_forgotten() -> None:
    async with serving(config(request_timeout_s=0.5)) as served:
        with Receiver() as receiver:
            early = [served.later(served.register(receiver, f"never{n}")) for n in range(50)]
            early.append(
                served.later(served.http.post("/scheduler_receive_meta_data", json={"req_id": "no", "part_idx": 0}))
            )
            assert {(await reply).status_code for reply in early} == {504}
        assert served.front_end.shared.dialect.num_parts == 0
        assert not served.front_end.shared.dialect._lives


async def test_who_hangs_up_while_waiting_leaves_nothing_behind(served: Served) -> None:
    with Receiver() as receiver:
        early = served.later(served.register(receiver))
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        early.cancel()
        while served.front_end.shared.dialect.num_parts:
            await asyncio.sleep(0.01)
        assert not served.front_end.shared.dialect._lives


# -- duplicates and lost callers


async def test_an_equal_request_waits_for_the_first(served: Served) -> None:
    served.service.gate.clear()
    first = served.later(served.encode(time_stats_json="1", encoder_idx=0))
    await served.service.arrived.wait()
    second = served.later(served.encode(time_stats_json="2", encoder_idx=1))
    refused(await served.encode("r_local_part_0", picture(7)), 409, "another body")
    with Receiver() as receiver:
        ok(await served.register(receiver))
        served.service.gate.set()
        ok(await first)
        ok(await second)
        check(await receiver.message(), 3)
        ok(await served.encode())  # a late retry: the same answer, and no second copy
        assert await receiver.nothing_more()
    assert len(served.service.seen) == 1
    ok_again = served.later(served.encode("r_local_part_0", picture(7)))  # an id may be used again after its end
    with Receiver() as receiver:
        while len(served.service.seen) < 2:
            await asyncio.sleep(0.01)
        ok(await served.register(receiver))
        ok(await ok_again)
        check(await receiver.message(), 7)


async def test_a_client_that_timed_out_and_tries_again_loses_nothing(served: Served) -> None:
    served.service.gate.clear()
    first = served.later(served.encode())
    await served.service.arrived.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = served.later(served.encode())
    with Receiver() as receiver:
        ok(await served.register(receiver))
        served.service.gate.set()
        ok(await second)
        check(await receiver.message(), 3)
    assert len(served.service.seen) == 1
    assert not served.service.cancelled


async def test_what_nobody_waits_for_is_cancelled(served: Served) -> None:
    served.front_end.shared.dialect._parts._limits = replace(
        served.front_end.shared.dialect._parts._limits, lonely_s=0.2
    )
    served.service.gate.clear()
    encode = served.later(served.encode())
    await served.service.arrived.wait()
    encode.cancel()
    while not served.service.cancelled:
        await asyncio.sleep(0.01)
    await served.idle()
    with Receiver() as late:
        ok(await served.register(late))
        assert (await late.message()).head.error_code == 503


async def test_receivers_keep_a_part_whose_caller_has_gone(served: Served) -> None:
    served.front_end.shared.dialect._parts._limits = replace(
        served.front_end.shared.dialect._parts._limits, lonely_s=0.1
    )
    served.service.gate.clear()
    encode = served.later(served.encode())
    await served.service.arrived.wait()
    with Receiver() as receiver:
        ok(await served.register(receiver))
        encode.cancel()
        await asyncio.sleep(0.6)
        served.service.gate.set()
        check(await receiver.message(), 3)
    assert not served.service.cancelled


# -- bounds


async def test_staged_embeddings_are_bounded_in_bytes() -> None:
    async with serving(config(max_staged_bytes=100)) as served:
        first = served.later(served.encode("a", picture(10)))  # 80 bytes
        while not served.front_end.shared.dialect.staged_bytes:
            await asyncio.sleep(0.01)
        refused(await served.encode("b", picture(10)), 503, "--max-staged-bytes", req_id="b")
        with Receiver() as receiver:
            ok(await served.register(receiver, "a"))
            ok(await first)
            again = served.later(served.encode("b", picture(10)))
            while not served.front_end.shared.dialect.staged_bytes:
                await asyncio.sleep(0.01)
            ok(await served.register(receiver, "b"))
            ok(await again)
        await served.idle()


async def test_media_are_let_go_of_before_receivers_come(served: Served) -> None:
    encode = served.later(served.encode())
    while not served.front_end.shared.dialect.staged_bytes:
        await asyncio.sleep(0.01)
    assert served.service.reserved == 0
    with Receiver() as receiver:
        ok(await served.register(receiver))
    await encode


async def test_requests_in_hand_are_bounded_in_number() -> None:
    async with serving(config(max_queued_items=3)) as served:
        served.service.gate.clear()
        encodes = [served.later(served.encode(f"r{n}")) for n in range(3)]
        while len(served.service.seen) < 3:
            await asyncio.sleep(0.01)
        with Receiver() as receiver:
            early = served.later(served.register(receiver, "more"))
            while served.front_end.shared.dialect.num_parts < 4:
                await asyncio.sleep(0.01)
            refused(await served.encode("more"), 503, "too many", req_id="more")
            ok(await early)
            assert (await receiver.message()).head.error_code == 503
        for encode in encodes:
            encode.cancel()


async def test_a_part_that_gets_no_turn_is_forgotten_with_its_receivers(served: Served) -> None:
    """Its body is not read, so it cannot be named: SGLang's own side, which has the status, makes them hang up."""
    turns = served.front_end._config.http.turns  # type: ignore[union-attr]
    with Receiver() as receiver:
        early = served.later(served.register(receiver))
        while served.front_end.shared.dialect.num_parts == 0:
            await asyncio.sleep(0.01)
        served.give_no_turns()
        refused(await served.encode(), 503, "--max-queued-items", req_id=None)
        assert not early.done()
        early.cancel()
        while served.front_end.shared.dialect.num_parts:
            await asyncio.sleep(0.01)
        served.front_end._config.http.turns = turns  # type: ignore[union-attr]
        again = served.later(served.encode())
        ok(await served.register(receiver))
        ok(await again)
        check(await receiver.message(), 3)


@pytest.mark.timeout(200)
async def test_a_thousand_at_once_are_all_answered(served: Served) -> None:
    """Early, late, doubled and missing registrations together; every call gets an answer, no part comes twice."""
    receivers = [Receiver() for _ in range(2)]
    count = 1000

    async def one(n: int) -> tuple[int, int]:
        part_id = f"r{n}_local_part_0"
        registrations = [served.register(r, part_id, 2) for r in receivers]
        if n % 10 == 9:  # the second rank never comes
            registrations.pop().close()  # a coroutine that is not begun
        if n % 3 == 0:  # a rank says it twice
            registrations.append(served.register(receivers[0], part_id, 2))
        encode = served.later(served.encode(part_id, picture(2)))
        if n % 2:
            await asyncio.sleep(0.05 * (n % 7))
        replies = await asyncio.gather(*registrations)
        assert {reply.status_code for reply in replies} <= {200, 400}
        return n, (await encode).status_code

    try:
        # Longer than any machine takes; when all others have their answers, it is over for the missing.
        parts = served.front_end.shared.dialect._parts
        parts._limits = replace(parts._limits, staged_s=1000.0)
        calls = [asyncio.create_task(one(n)) for n in range(count)]
        await asyncio.gather(*(call for n, call in enumerate(calls) if n % 10 != 9))
        while [part.phase for part in parts._by_key.values() if not part.is_closed] != [Phase.STAGED] * (count // 10):
            await asyncio.sleep(0.01)
        for part in parts._by_key.values():
            if part.phase is Phase.STAGED:
                part.deadline = 0.0
        answers = dict(await asyncio.gather(*calls))
        assert answers == {n: 504 if n % 10 == 9 else 200 for n in range(count)}
        for place, receiver in enumerate(receivers):
            due = count if place == 0 else count - count // 10
            got = [(await receiver.message()).head.req_id for _ in range(due)]
            assert len(set(got)) == due
            assert await receiver.nothing_more(1)
    finally:
        for receiver in receivers:
            receiver.close()
    await served.idle()
