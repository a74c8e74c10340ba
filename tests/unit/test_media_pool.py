"""The pool: bounded, cancellable before a job begins, closed cleanly."""

import asyncio
import threading

import pytest

from spmd_encoder.media.pool import MediaPool


async def test_results_and_errors() -> None:
    pool = MediaPool()
    assert await pool.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 7, 0)
    await pool.close()
    await pool.close()
    with pytest.raises(RuntimeError):
        await pool.run(divmod, 7, 2)


async def test_bounded_and_cancellable() -> None:
    pool = MediaPool(2)
    gate = threading.Event()
    both = threading.Semaphore(0)
    began: list[int] = []

    def job(number: int) -> int:
        began.append(number)
        both.release()
        gate.wait(10)
        return number

    tasks = [asyncio.create_task(pool.run(job, n)) for n in range(4)]
    for _ in range(2):
        assert await asyncio.to_thread(both.acquire, timeout=10)
    tasks[2].cancel()
    await asyncio.sleep(0.01)
    gate.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) != [0, 1, 2, 3]
    assert sorted(began) == [0, 1, 3]
    await pool.close()


async def test_close_waits_for_what_runs_and_cancels_what_waits() -> None:
    pool = MediaPool()
    gate = threading.Event()
    running = asyncio.create_task(pool.run(gate.wait, 10))
    waiting = asyncio.create_task(pool.run(divmod, 7, 2))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0.01)
    assert waiting.cancelled() or waiting.done()
    assert not closing.done()
    gate.set()
    await closing
    assert await running


def test_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one"):
        MediaPool(0)
