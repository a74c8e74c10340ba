"""The compute thread: order, exceptions, and how long a call has been running."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spmd_encoder.worker.compute import ComputeThread


@contextmanager
def compute_thread() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    try:
        yield thread
    finally:
        thread.close()


def threads() -> int:
    return sum(thread.name == "compute" for thread in threading.enumerate())


async def test_calls_run_one_after_another_in_order_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    gate = threading.Event()

    def call(number: int) -> int:
        gate.wait(30)
        seen.append((number, threading.get_ident()))
        return number * number

    with compute_thread() as compute:
        futures = [compute.submit(lambda n=n: call(n)) for n in range(20)]  # type: ignore[misc]
        gate.set()
        assert await asyncio.gather(*futures) == [n * n for n in range(20)]
    assert [number for number, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("broken"), Odd("odd"), SystemExit(3)])
async def test_an_exception_reaches_its_caller_and_nobody_else(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with compute_thread() as compute:
        bad, good = compute.submit(fail), compute.submit(lambda: 7)
        assert await good == 7
        assert bad.exception() is error


async def test_stop_iteration_does_not_hang_its_caller() -> None:
    with compute_thread() as compute, pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(compute.submit(lambda: next(iter(()))), 30)


async def test_busy_s_tells_how_long_the_present_call_runs() -> None:
    gate = threading.Event()
    with compute_thread() as compute:
        assert compute.busy_s == 0.0
        future = compute.submit(lambda: gate.wait(30))
        await asyncio.sleep(0.05)
        first = compute.busy_s
        await asyncio.sleep(0.05)
        second = compute.busy_s
        assert 0.02 < first < second
        gate.set()
        await future
        assert compute.busy_s == 0.0
        with pytest.raises(ZeroDivisionError):
            await compute.submit(lambda: 1 // 0)
        assert compute.busy_s == 0.0


async def test_a_caller_that_has_gone_disturbs_nothing() -> None:
    gate = threading.Event()
    with compute_thread() as compute:
        left = compute.submit(lambda: gate.wait(30))
        left.cancel()
        after = compute.submit(lambda: "done")
        gate.set()
        assert await after == "done"
        await asyncio.sleep(0)
        assert left.cancelled()


async def test_close_waits_for_what_was_submitted() -> None:
    before = threads()
    done: list[int] = []
    compute = ComputeThread()
    assert threads() == before + 1
    for number in range(5):
        compute.submit(lambda n=number: done.append(n))  # type: ignore[misc]
    compute.close()
    assert done == [0, 1, 2, 3, 4]
    assert threads() == before


async def test_cpu_s_is_the_threads_own_time() -> None:
    def burn() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.03:
            pass

    with compute_thread() as compute:
        await compute.submit(lambda: None)
        before = compute.cpu_s
        burn()
        await compute.submit(burn)
        assert 0.03 <= compute.cpu_s - before < 0.06
