"""The scheduler over a fake engine: when items start, what they are answered, what the keeper is told."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.wire.messages import Completed, Failed
from tests.harness.examples import examples
from tests.harness.scheduler_bench import bench, job


async def test_a_lone_item_starts_at_once_and_arrivals_meanwhile_share_the_next_forward() -> None:
    async with bench() as b:
        b.submit(job(1))
        await b.settle()
        assert b.engine.batches == [[1]]
        b.submit(job(2))
        b.submit(job(3), job(4))
        await b.settle()
        assert b.engine.batches == [[1]]
        assert b.engine.prepared == [1, 2, 3, 4], "preparation goes on during a forward"
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1], [2, 3, 4]]
        assert b.completed == [1, 2, 3, 4]


async def test_what_is_nearly_prepared_joins_the_forward_that_it_would_wait_for() -> None:
    async with bench() as b:
        b.engine.gate.set()
        for job_id in range(1, 5):  # each is prepared in 10 ms; each forward says that it took 250 ms
            b.engine.hold_prepare[job_id] = asyncio.Event()
            b.submit(job(job_id))
            await b.settle()
            b.now += 0.01
            b.engine.hold_prepare[job_id].set()
            await b.settle()
        assert b.engine.batches == [[1], [2], [3], [4]]
        for job_id in (5, 6, 7):
            b.engine.hold_prepare[job_id] = asyncio.Event()
        b.submit(job(5), job(6), job(7))
        await b.settle()
        b.now += 0.01
        b.engine.hold_prepare[5].set()
        await b.settle()
        assert b.engine.batches[4:] == [], "6 is nearly there"
        b.engine.hold_prepare[6].set()
        b.now += 0.1
        b.engine.hold_prepare[7].set()
        await b.settle()
        assert b.engine.batches[4:] == [[5, 6, 7]]


async def test_nobody_waits_longer_than_twice_the_usual_time_for_what_is_late() -> None:
    async with bench() as b:
        b.engine.gate.set()
        b.engine.hold_prepare[1] = asyncio.Event()
        b.submit(job(1))
        await b.settle()
        b.now += 0.01
        b.engine.hold_prepare[1].set()
        await b.settle()
        b.engine.hold_prepare |= {2: asyncio.Event(), 3: asyncio.Event()}
        b.submit(job(2), job(3))
        await b.settle()
        b.now += 0.01
        b.engine.hold_prepare[2].set()
        await b.settle()
        assert b.engine.batches == [[1]]
        b.now += 1.0
        while len(b.engine.batches) < 2:  # the timer's own 20 ms
            await asyncio.sleep(0.001)
        assert b.engine.batches == [[1], [2]]


@pytest.mark.parametrize("what", ["fail", "are given up", "are of another kind"])
async def test_nobody_waits_longer_while_others_that_are_prepared_do_not_join(what: str) -> None:
    async with bench(lookahead=100) as b:
        b.engine.gate.set()
        for job_id in range(1, 3):  # each is prepared in 10 ms, and then comes the next one
            await b.prepare_in(0.01, job_id)
        assert b.engine.batches == [[1], [2]]
        others = range(4, 40)
        for job_id in (3, *others):
            b.engine.hold_prepare[job_id] = asyncio.Event()
            if what == "fail" and job_id != 3:
                b.engine.prepare_errors[job_id] = EncoderError(ErrorCode.MEDIA_CORRUPT, "no picture")
            b.engine.keys[job_id] = "k" if job_id == 3 else "another"
        b.submit(job(3), *(job(job_id) for job_id in others))
        await b.settle()
        b.now += 0.01
        b.engine.hold_prepare[3].set()
        await b.settle()
        assert b.engine.batches[2:] == [], "the next one is nearly there"
        for job_id in others:
            b.now += 0.01
            if what == "are given up":
                b.scheduler.cancel([job_id])
            b.engine.hold_prepare[job_id].set()
            await b.settle()
            if b.engine.batches[2:]:
                break
        assert b.engine.batches[2:3] == [[3]]
        assert job_id <= 6, "it has waited for twice the usual time"


async def test_the_result_is_the_items_own() -> None:
    async with bench() as b:
        b.engine.gate.set()
        b.submit(job(1), job(2))
        await b.settle()
        for job_id, (message, frames) in zip((1, 2), b.replies, strict=True):
            assert isinstance(message, Completed)
            assert (message.job_id, message.shape, message.dtype) == (job_id, (1, job_id), "uint8")
            assert frames == [b"data %d" % job_id]
            assert message.times.forward_s == 0.25


async def test_times_are_told_apart() -> None:
    async with bench() as b:
        b.engine.hold_prepare[1] = asyncio.Event()
        b.submit(job(1))
        await b.settle()
        b.now = 3.0
        b.engine.hold_prepare[1].set()
        b.engine.gate.set()
        await b.settle()
        message, _ = b.replies[0]
        assert isinstance(message, Completed)
        assert (message.times.queue_s, message.times.preprocess_s) == (0.0, 3.0)


async def test_limits_hold() -> None:
    async with bench(max_items=2, max_tokens=10) as b:
        b.submit(job(1))
        await b.settle()
        b.submit(job(2, cost=6), job(3, cost=6), job(4, cost=4), job(5, cost=50))
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1], [2, 4], [3], [5]]


async def test_keys_outputs_and_modalities_that_may_not_share_a_forward() -> None:
    async with bench(max_items=9) as b:
        b.engine.keys[3] = "other"
        b.submit(job(1))
        await b.settle()
        video = {"modality": Modality.VIDEO}
        b.submit(job(2), job(3), job(4, output=OutputKind.POOLED), job(5, **video), job(6, **video), job(7))
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1], [2, 7], [3], [4], [5, 6]]


async def test_a_cancelled_item_never_starts() -> None:
    async with bench(lookahead=2) as b:
        b.submit(job(1))
        await b.settle()
        b.engine.hold_prepare[3] = asyncio.Event()
        b.submit(job(2), job(3), job(4), job(5))
        await b.settle()
        assert b.suspects() == {1}, "preparation is done elsewhere: only what is in the tower can kill the worker"
        b.scheduler.cancel([2, 3, 4, 99])  # prepared, preparing, waiting, unknown
        await b.settle()
        assert b.engine.prepared[-1] == 5, "the next one is prepared at once"
        b.engine.hold_prepare[3].set()
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1], [5]]
        assert b.engine.prepared == [1, 2, 5], "the preparation of 3 was broken off"
        assert b.completed == [1, 5]
        assert b.failed == dict.fromkeys((2, 3, 4), ErrorCode.CANCELLED)


async def test_a_cancel_during_the_forward_lets_it_run_out() -> None:
    async with bench() as b:
        b.submit(job(1))
        await b.settle()
        b.scheduler.cancel([1])
        assert b.suspects() == {1}
        b.engine.gate.set()
        await b.settle()
        assert b.completed == [1]
        assert b.suspects() == set()


async def test_an_expired_item_never_starts() -> None:
    async with bench(lookahead=1) as b:
        b.submit(job(1))
        await b.settle()
        b.submit(job(2, budget_s=5.0), job(3, budget_s=5.0), job(4, budget_s=50.0))
        await b.settle()
        b.now = 5.0
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1], [4]], "2 was prepared and 3 waited when their time was over"
        assert b.failed == dict.fromkeys((2, 3), ErrorCode.DEADLINE_EXCEEDED)
        assert b.scheduler.stats.dropped == 2
        assert b.in_tower == [(1,), (), (4,), ()]


async def test_what_stands_behind_an_expired_batch_is_not_forgotten() -> None:
    """Nothing else arrives that would wake the scheduler."""
    async with bench() as b:
        b.engine.keys[2] = "other"
        b.submit(job(1))
        await b.settle()
        b.submit(job(2, budget_s=5.0), job(3), job(4, alone=True), job(5))
        await b.settle()
        b.now = 5.0
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1], [3], [4], [5]]
        assert b.failed == {2: ErrorCode.DEADLINE_EXCEEDED}


async def test_an_alone_item_that_expires_makes_way() -> None:
    async with bench() as b:
        b.engine.hold_prepare[1] = asyncio.Event()
        b.submit(job(1, alone=True, budget_s=5.0), job(2))
        await b.settle()
        b.now = 6.0
        b.engine.hold_prepare[1].set()
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[2]]


async def test_failures_are_the_items_own() -> None:
    async with bench() as b:
        b.engine.prepare_errors = {2: EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "no"), 3: ZeroDivisionError("x")}
        b.engine.run_errors = {4: EncoderError(ErrorCode.NON_FINITE, "NaN")}
        b.engine.gate.set()
        b.submit(job(1), job(2), job(3), job(4), job(5))
        await b.settle()
        assert sorted(b.completed) == [1, 5]
        assert b.failed == {
            2: ErrorCode.MEDIA_UNSUPPORTED,
            3: ErrorCode.MEDIA_CORRUPT,
            4: ErrorCode.NON_FINITE,
        }
        (corrupt,) = [m for m, _ in b.replies if isinstance(m, Failed) and m.job_id == 3]
        assert "ZeroDivisionError" in corrupt.message
        assert b.suspects() == set()


async def test_an_engine_out_of_step_ends_the_run_and_leaves_its_jobs_suspect() -> None:
    async with bench() as b:
        b.engine.broken = ArithmeticError("out of step")
        b.engine.gate.set()
        b.submit(job(1), job(2))
        with pytest.raises(ArithmeticError):
            await asyncio.wait_for(b.running, 30)
        assert b.suspects() == {1, 2}
        assert b.replies == []


async def test_alone_has_nothing_beside_it() -> None:
    async with bench() as b:
        b.engine.gate.set()
        b.submit(*(job(n, alone=n in (2, 3, 6)) for n in range(1, 8)))
        await b.settle()
        assert sorted(b.completed) == list(range(1, 8))
        assert [b.engine.beside.get(n, set()) for n in (2, 3, 6)] == [set(), set(), set()]
        assert [2] in b.engine.batches
        assert b.engine.beside[4], "the others do share"


async def test_stop_rejects_what_waits_and_finishes_what_runs() -> None:
    async with bench(lookahead=2) as b:
        b.submit(job(1))
        await b.settle()
        b.engine.hold_prepare[2] = asyncio.Event()
        b.submit(job(2), job(3), job(4))
        await b.settle()
        b.scheduler.stop()
        assert b.failed == dict.fromkeys((2, 3, 4), ErrorCode.DRAINING)
        b.submit(job(5))
        assert b.failed[5] is ErrorCode.DRAINING
        assert not b.running.done()
        b.engine.gate.set()
        await asyncio.wait_for(b.running, 30)
        assert b.completed == [1]
        assert b.engine.batches == [[1]]


async def test_stop_while_idle_ends_the_run() -> None:
    async with bench() as b:
        await b.settle()
        b.scheduler.stop()
        await asyncio.wait_for(b.running, 30)


async def test_the_same_job_twice_is_one_job() -> None:
    async with bench() as b:
        b.submit(job(1), job(1))
        await b.settle()
        b.submit(job(1))
        b.engine.gate.set()
        await b.settle()
        assert b.engine.batches == [[1]]
        assert b.completed == [1]


async def test_the_numbers_add_up() -> None:
    async with bench(max_items=2) as b:
        b.engine.prepare_errors = {3: ValueError("x")}
        b.submit(job(1, cost=3))
        await b.settle()
        b.submit(job(2, cost=5), job(3), job(4, cost=7), job(5, budget_s=1.0))
        await b.settle()
        stats = b.scheduler.heartbeat().stats
        assert (stats.queue_items, stats.running_items) == (3, 1)
        b.now = 2.0
        b.engine.gate.set()
        await b.settle()
        stats = b.scheduler.heartbeat().stats
        assert (stats.completed, stats.failed, stats.dropped) == (3, 1, 1)
        assert (stats.batches, stats.batch_items, stats.batch_tokens) == (2, 3, 15)
        assert stats.forward_s == 0.5
        assert stats.batch_size_counts == ((1, 1), (2, 1))
        assert stats.queue_s == 4.0, "2 and 4 waited two seconds each"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 3), st.sampled_from(["", "", "alone", "brief", "corrupt", "nan"])),
        st.tuples(st.just("cancel"), st.integers(1, 25), st.just("")),
        st.tuples(st.just("gate"), st.booleans(), st.just("")),
        st.tuples(st.just("wait"), st.integers(1, 8), st.just("")),
        st.tuples(st.just("time"), st.integers(1, 3), st.just("")),
    ),
    max_size=25,
)


@examples(150)
@given(steps=steps, max_items=st.integers(1, 4), lookahead=st.integers(1, 5))
def test_every_job_is_answered_once(steps: list[tuple[str, int, str]], max_items: int, lookahead: int) -> None:
    async def play() -> None:
        async with bench(max_items=max_items, max_tokens=6, lookahead=lookahead) as b:
            submitted: set[int] = set()
            cancelled: set[int] = set()
            alone: set[int] = set()
            for step, number, flavour in steps:
                match step:
                    case "submit":
                        ids = range(len(submitted) + 1, len(submitted) + 1 + number)
                        submitted |= set(ids)
                        if flavour == "corrupt":
                            b.engine.prepare_errors |= {n: ValueError("x") for n in ids}
                        if flavour == "nan":
                            b.engine.run_errors |= {n: EncoderError(ErrorCode.NON_FINITE, "NaN") for n in ids}
                        if flavour == "alone":
                            alone |= set(ids)
                        budget = 2.0 if flavour == "brief" else 1000.0
                        b.submit(*(job(n, cost=n % 5 + 1, alone=flavour == "alone", budget_s=budget) for n in ids))
                    case "cancel":
                        cancelled.add(number) if number in submitted else None
                        b.scheduler.cancel([number])
                    case "gate":
                        b.engine.gate.set() if number else b.engine.gate.clear()
                    case "time":
                        b.now += number
                    case "wait":
                        for _ in range(number):
                            await asyncio.sleep(0)
            b.engine.gate.set()
            for _ in range(20 + 12 * len(submitted)):
                await asyncio.sleep(0)
            answers = Counter(message.job_id for message, _ in b.replies)  # type: ignore[attr-defined]
            assert max(answers.values(), default=1) == 1
            assert answers.keys() == submitted
            assert b.suspects() == set()
            ran = Counter(job_id for batch in b.engine.batches for job_id in batch)
            assert max(ran.values(), default=1) == 1
            assert all(not b.engine.beside.get(job_id) for job_id in alone - cancelled)
            stats = b.scheduler.stats
            assert stats.completed == len(b.completed)
            assert stats.failed + stats.dropped == sum(c is not ErrorCode.CANCELLED for c in b.failed.values())
            assert stats.batch_items == sum(map(len, b.engine.batches))

    asyncio.run(play())
