"""The pool of preparers over real processes: a death or a hang costs one item, whatever its neighbours do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from spmd_encoder.api.types import ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.cpu_time import cpu_seconds
from spmd_encoder.wire.shared_memory import SHARED_BYTES
from tests.harness.preparers import Child, ask, error_of, pool_of, settled, start


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_answers_refusals_and_large_items() -> None:
    async with pool_of(2) as pool:
        assert await ask(pool, b"abc") == b"cba"
        assert (await error_of(pool, b"bad")).message == "no picture"
        big = os.urandom(3_000_000)
        assert await asyncio.gather(*(ask(pool, big) for _ in range(4))) == [big[::-1]] * 4
        pids = await settled(pool, 2)
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("memory", ["shared", "none", "loose"])
async def test_items_of_every_size_come_whole_with_and_without_shared_memory(memory: str) -> None:
    pids = set()
    async with pool_of(1, starter=lambda: start(memory=memory)) as pool:
        for size in (1, 63, 64, 65, 300_000, 2 * 2**20, 2 * 2**20 + 1, SHARED_BYTES, SHARED_BYTES + 1, 10, 1):
            media = os.urandom(size)
            assert await ask(pool, media) == media[::-1], size
            pids.add(pool.pids)
        assert len(pids) == 1


class Starts:
    """Starts processes, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> Child:
        self.count += 1
        return await start()


async def test_what_kills_its_decoder_fails_alone_and_is_tried_twice() -> None:
    starts = Starts()
    async with pool_of(2, starter=starts) as pool:
        outcomes = await asyncio.gather(
            *(ask(pool, media) for media in (b"one", b"die", b"two", b"three")), return_exceptions=True
        )
        assert [o for o in outcomes if isinstance(o, bytes)] == [b"eno", b"owt", b"eerht"]
        error = outcomes[1]
        assert isinstance(error, EncoderError)
        assert error.code is ErrorCode.MEDIA_CORRUPT
        assert "2 decoder processes died" in error.message
        await settled(pool, 2)
        assert starts.count == 4
        assert await ask(pool, b"abc") == b"cba"


async def test_what_cost_a_decoder_is_refused_at_once_the_next_time() -> None:
    starts = Starts()
    async with pool_of(1, timeout_s=2.0, starter=starts, cpu_seconds=Busy(1.0)) as pool:
        await settled(pool, 1)
        for media, deaths in ((b"die", 2), (b"hang", 1)):
            before = starts.count
            # All but the first wait for the only decoder while it is at the first.
            first, *others = await asyncio.gather(*(error_of(pool, media) for _ in range(3)))
            await settled(pool, 1)
            again = await error_of(pool, media)
            assert {error.message for error in (*others, again)} == {first.message}
            assert first.code is again.code is ErrorCode.MEDIA_CORRUPT
            assert "10 minutes" in first.message
            assert starts.count - before == deaths
        assert await ask(pool, b"abc") == b"cba"
        assert (await error_of(pool, b"bad")).message == (await error_of(pool, b"bad")).message == "no picture"


async def test_a_film_is_refused_only_as_it_was_sampled() -> None:
    starts = Starts()
    async with pool_of(1, starter=starts) as pool:
        dense, sparse = ItemOptions(fps=30.0), ItemOptions(fps=0.1, max_frames=2)
        first = await error_of(pool, b"film", Modality.VIDEO, dense)
        assert "2 decoder processes died" in first.message
        assert await ask(pool, b"film", Modality.VIDEO, sparse) == b"mlif"
        assert await ask(pool, b"film", Modality.AUDIO) == b"mlif"
        assert starts.count == 3
        assert (await error_of(pool, b"film", Modality.VIDEO, dense)).message == first.message
        assert starts.count == 3, "equal items are refused at once"


async def test_a_decoder_killed_from_outside_costs_nobody_anything() -> None:
    async with pool_of(1) as pool:
        assert await ask(pool, b"warm") == b"mraw"
        slow = asyncio.create_task(ask(pool, b"slow"))
        await asyncio.sleep(0.1)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await slow == b"wols"
        # Also one that died while nobody asked it anything.
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await ask(pool, b"abc") == b"cba"


async def test_a_stopped_decoder_is_replaced_at_the_timeout() -> None:
    """It had no processor, so that its item is not to blame, and may be tried again at once."""
    async with pool_of(1, timeout_s=3.0) as pool:
        for _ in range(2):
            assert await ask(pool, b"abc") == b"cba"
            before = pool.pids
            error = await error_of(pool, b"hang")
            assert error.code is ErrorCode.OVERLOADED
            assert "--preprocess-timeout-s" in error.message and "0.0 s of these" in error.message
            assert await ask(pool, b"abc") == b"cba"
            assert pool.pids != before


class Busy:
    """Tells of a process that it had `seconds` more of a processor whenever it is asked; None: it cannot tell."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._had = 0.0

    def __call__(self, pid: int) -> float | None:
        if self._seconds is not None:
            self._had += self._seconds
        return self._had if self._seconds is not None else None


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        (0.9, ErrorCode.OVERLOADED),
        (1.0, ErrorCode.MEDIA_CORRUPT),
        (2.0, ErrorCode.MEDIA_CORRUPT),
        (None, ErrorCode.MEDIA_CORRUPT),
    ],
)
async def test_only_what_had_a_processor_half_of_its_time_is_slow(seconds: float | None, code: ErrorCode) -> None:
    starts = Starts()
    async with pool_of(1, timeout_s=2.0, starter=starts, cpu_seconds=Busy(seconds)) as pool:
        await settled(pool, 1)
        errors = [await error_of(pool, b"hang") for _ in range(2)]
        assert {error.code for error in errors} == {code}
        await settled(pool, 1)
        assert starts.count == (3 if code is ErrorCode.OVERLOADED else 2), "equal items are refused at once, or tried"


async def test_a_processs_time_is_that_of_all_its_threads() -> None:
    script = """
import threading, time

def burn():
    while time.process_time() < 0.5:
        pass

thread = threading.Thread(target=burn)
thread.start()
thread.join()
print("done", flush=True)
time.sleep(3600)
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    had = cpu_seconds(process.pid)
    assert had is not None and had >= 0.45
    process.kill()
    await process.wait()
    assert cpu_seconds(process.pid) is None


async def test_an_answer_that_is_here_is_taken_though_its_time_is_over() -> None:
    """As when the leader itself stood still."""
    async with pool_of(1, timeout_s=1.0) as pool:
        await settled(pool, 1)
        pids = pool.pids
        asking = asyncio.create_task(ask(pool, b"slow"))
        await asyncio.sleep(0.1)
        time.sleep(2.0)  # noqa: ASYNC251
        assert await asking == b"wols"
        assert await ask(pool, b"abc") == b"cba"
        assert pool.pids == pids


async def test_a_process_that_stands_still_while_it_loads_is_replaced() -> None:
    starts = 0

    async def first_is_stopped() -> Child:
        nonlocal starts
        starts += 1
        child = await start()
        if starts == 1:
            os.kill(child.pid, signal.SIGSTOP)
        return child

    async with pool_of(1, starter=first_is_stopped, start_timeout_s=5.0, timeout_s=5.0) as pool:
        try:
            answer = await asyncio.wait_for(ask(pool, b"abc"), 60)
        except EncoderError as error:  # on a busy machine it may have loaded before it was stopped
            assert error.code is ErrorCode.OVERLOADED
            answer = await asyncio.wait_for(ask(pool, b"abc"), 60)
        assert answer == b"cba"
        assert starts == 2


async def test_a_replacement_that_does_not_come_up_is_no_fault_of_the_item() -> None:
    starts = 0

    async def second_dies() -> Child:
        nonlocal starts
        starts += 1
        child = await start(3600.0 if starts == 2 else 0.0)
        if starts == 2:
            child.kill()
        return child

    async with pool_of(1, starter=second_dies) as pool:
        assert await ask(pool, b"warm") == b"mraw"
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await ask(pool, b"abc") == b"cba"
        assert starts == 3


async def test_the_time_to_load_counts_for_no_item() -> None:
    async with pool_of(1, timeout_s=1.0, starter=lambda: start(2.0)) as pool:
        assert await ask(pool, b"abc") == b"cba"


async def test_ready_is_when_the_first_process_has_loaded() -> None:
    async with pool_of(2, starter=lambda: start(0.5)) as pool:
        assert pool.pids == ()
        await asyncio.wait_for(pool.wait_ready(), 20)
        assert len(pool.pids) >= 1


async def test_whoever_gives_up_does_not_take_the_process_with_him() -> None:
    async with pool_of(1) as pool:
        assert await ask(pool, b"warm") == b"mraw"
        pids = pool.pids
        running, waiting = (asyncio.create_task(ask(pool, b"slow")) for _ in range(2))
        await asyncio.sleep(0.05)
        running.cancel()
        waiting.cancel()
        assert await asyncio.wait_for(ask(pool, b"abc"), 10) == b"cba", "not the answer to what was given up"
        assert pool.pids == pids


async def test_a_start_that_fails_is_tried_again() -> None:
    failures = 2

    async def sometimes() -> Child:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError("no more processes")
        return await start()

    async with pool_of(1, starter=sometimes) as pool:
        assert await ask(pool, b"abc") == b"cba"


async def test_closing_ends_what_runs_and_what_waits() -> None:
    async with pool_of(1) as pool:
        assert await ask(pool, b"warm") == b"mraw"
        (pid,) = pool.pids
        tasks = [asyncio.create_task(ask(pool, b"hang")) for _ in range(3)]
        await asyncio.sleep(0.05)
        await pool.close()
        for task in tasks:
            task.cancel()
        assert all(isinstance(o, BaseException) for o in await asyncio.gather(*tasks, return_exceptions=True))
    assert is_gone(pid)
