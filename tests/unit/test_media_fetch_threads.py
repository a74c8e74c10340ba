"""Threads that may hang: their number is bounded, and they keep nothing from ending."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spmd_encoder.media.daemon_threads import DaemonThreads


async def test_results_and_failures_come_back() -> None:
    threads = DaemonThreads(2)
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(threading.get_ident) != threading.get_ident()


async def test_no_more_at_once_than_allowed() -> None:
    lock, now, peak, go = threading.Lock(), 0, 0, threading.Event()

    def work() -> None:
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        go.wait()
        with lock:
            now -= 1

    threads = DaemonThreads(3)
    jobs = [asyncio.create_task(threads.run(work)) for _ in range(10)]
    while peak < 3:
        await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*jobs)
    assert peak == 3


async def test_a_cancelled_call_keeps_its_place_until_it_has_ended() -> None:
    go, threads = threading.Event(), DaemonThreads(1)
    first = asyncio.create_task(threads.run(go.wait))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(threads.run(lambda: go.is_set()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()
    go.set()
    assert await second is True


def test_a_hanging_call_does_not_keep_the_process() -> None:
    code = """
import asyncio, threading
from spmd_encoder.media.daemon_threads import DaemonThreads

async def main():
    try:
        async with asyncio.timeout(0.05):
            await DaemonThreads(1).run(threading.Event().wait)
    except TimeoutError:
        print("ended")

asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ended\n"
