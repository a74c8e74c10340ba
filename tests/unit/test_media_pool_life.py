"""The pool's processes between questions: whom it gives the next one, and what it takes back and gives up."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from array import array
from pathlib import Path

import pytest

from spmd_encoder.api.types import NO_OPTIONS, Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.wire.preparing import Prepare
from tests.harness.preparers import Child, ask, error_of, pool_of, settled, start


async def test_a_decoder_that_dies_while_nobody_asks_is_replaced_at_once() -> None:
    async with pool_of(2) as pool:
        before = await settled(pool, 2)
        os.kill(before[0], signal.SIGKILL)
        while before[0] in pool.pids:
            await asyncio.sleep(0.01)
        after = await settled(pool, 2)
        assert before[1] in after and before[0] not in after
        assert await asyncio.gather(*(ask(pool, b"abc") for _ in range(4))) == [b"cba"] * 4


async def test_one_that_speaks_unasked_is_replaced() -> None:
    """What it would say next is no answer to what it is asked next."""
    started: list[Child] = []

    async def chatty() -> Child:
        child = await start()
        started.append(child)
        return child

    async with pool_of(1, starter=chatty) as pool:
        await settled(pool, 1)
        assert await ask(pool, b"chat") == b"tahc"
        while len(started) < 2:
            await asyncio.sleep(0.01)
        assert await ask(pool, b"abc") == b"cba"
        assert len(started) == 2


async def test_the_next_item_goes_to_the_process_that_was_at_work_last() -> None:
    """Its memory is warm, and the others' goes back to the system."""
    asked: list[int] = []
    async with pool_of(3, cpu_seconds=asked.append) as pool:
        await settled(pool, 3)
        for _ in range(6):
            assert await ask(pool, b"abc") == b"cba"
        assert len(asked) == 6 and len(set(asked)) == 1


async def test_what_waits_is_taken_oldest_first() -> None:
    async with pool_of(1) as pool:
        await settled(pool, 1)
        done: list[int] = []

        async def one(number: int) -> None:
            await ask(pool, b"%d" % number)
            done.append(number)

        await asyncio.gather(*(one(number) for number in range(8)))
        assert done == list(range(8))


async def test_each_item_has_its_own_time() -> None:
    """Though one timer watches many: it is due in the midst of the second."""
    async with pool_of(1, timeout_s=3.0) as pool:
        pids = await settled(pool, 1)
        assert await ask(pool, b"abc") == b"cba"
        await asyncio.sleep(2.85)
        assert await ask(pool, b"slow") == b"wols"
        assert pool.pids == pids


@pytest.mark.parametrize("memory", ["shared", "none"])
async def test_a_large_item_that_is_given_up_leaves_the_line_in_step(memory: str) -> None:
    async with pool_of(1, starter=lambda: start(memory=memory)) as pool:
        pids = await settled(pool, 1)
        large = os.urandom(20_000_000)
        for pause_s in (0.0, 0.001, 0.01, 0.03):
            asking = asyncio.create_task(ask(pool, large))
            await asyncio.sleep(pause_s)
            asking.cancel()
            assert await ask(pool, b"abc") == b"cba"
        assert pool.pids == pids


async def test_closing_gives_up_what_runs_waits_and_is_tried_again() -> None:
    """Nobody is left waiting for ever."""
    starts = 0

    async def once() -> Child:
        nonlocal starts
        starts += 1
        if starts > 1:
            await asyncio.Event().wait()
        return await start()

    for media in (b"hang", b"die"):
        starts = 0
        async with pool_of(1, starter=once) as pool:
            await settled(pool, 1)
            tasks = [asyncio.create_task(ask(pool, media)) for _ in range(3)]
            while media == b"die" and starts < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            await pool.close()
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


async def test_no_descriptor_is_left_of_processes_that_died_and_of_pools_that_were_closed() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with pool_of(2) as pool:  # asyncio's own, for children
        await ask(pool, b"abc")
    before = descriptors()
    for _ in range(2):
        async with pool_of(2) as pool:
            await error_of(pool, b"die")
            assert await ask(pool, os.urandom(3_000_000))
    assert descriptors() == before


async def test_files_of_items_that_were_given_up_are_let_go_of_before_their_turn() -> None:
    """Else callers who hang up fill the memory while all processes are at something long."""
    async with pool_of(1) as pool:
        await settled(pool, 1)
        asking = asyncio.create_task(ask(pool, b"hang"))
        await asyncio.sleep(0)
        files = [array("B", bytes(100)) for _ in range(3)]
        kept = [weakref.ref(file) for file in files]
        request = Prepare(digest="sha256:1", modality=Modality.IMAGE, media_bytes=100, options=NO_OPTIONS)
        answers = [pool.run(request, memoryview(file)) for file in files]
        del files
        for answer in answers[1:]:
            answer.cancel()
        await asyncio.sleep(0)
        gc.collect()
        assert [file() is not None for file in kept] == [True, False, False]
        asking.cancel()


async def test_a_process_is_started_again_whatever_its_start_failed_for() -> None:
    starts = 0

    async def late() -> Child:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise StartupError("the nursery did not answer")
        return await start()

    async with pool_of(1, starter=late) as pool:
        await settled(pool, 1)
        asking = asyncio.create_task(ask(pool, b"slow"))
        await asyncio.sleep(0)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await asyncio.wait_for(asking, 60) == b"wols"
        assert starts == 3
