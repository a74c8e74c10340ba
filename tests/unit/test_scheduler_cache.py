"""The scheduler's results that it holds: a hit needs no forward, and what goes is told."""

from __future__ import annotations

from spmd_encoder.api.types import OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.wire.messages import Completed
from tests.harness.scheduler_bench import bench, job


async def test_a_result_that_is_held_needs_no_forward() -> None:
    async with bench(cache_bytes=100) as b:
        b.engine.gate.set()
        b.submit(job(1, digest="x"))
        await b.settle()
        b.submit(job(2, digest="x"), job(3, digest="x", output=OutputKind.POOLED), job(4, digest="x", probe=True))
        await b.settle()
        assert b.engine.prepared == [1, 3, 4], "another output and a probe are worked out"
        first, again = (reply for reply in b.replies if isinstance(reply[0], Completed) and reply[0].job_id in (1, 2))
        assert isinstance(first[0], Completed)
        assert isinstance(again[0], Completed)
        assert first[1] == again[1], "bit for bit"
        assert (first[0].cached, again[0].cached) == (False, True)
        assert again[0].shape == first[0].shape
        stats = b.scheduler.heartbeat().stats
        assert (stats.cache_hits, stats.cache_misses, stats.cache_entries, stats.cache_bytes) == (1, 2, 2, 12)


async def test_a_failure_is_not_held() -> None:
    async with bench(cache_bytes=100) as b:
        b.engine.gate.set()
        b.engine.run_errors[1] = EncoderError(ErrorCode.NON_FINITE, "nan")
        b.submit(job(1, digest="x"))
        await b.settle()
        b.submit(job(2, digest="x"))
        await b.settle()
        assert (b.failed, b.completed) == ({1: ErrorCode.NON_FINITE}, [2])


async def test_what_was_dropped_is_told_once() -> None:
    async with bench(cache_bytes=13, max_items=1) as b:
        b.engine.gate.set()
        for number in (1, 2, 3):  # of 6 bytes each
            b.submit(job(number))
            await b.settle()
        beat = b.scheduler.heartbeat()
        assert beat.evicted == (("d1", ""),)
        assert (beat.stats.cache_evictions, beat.stats.cache_bytes) == (1, 12)
        assert b.scheduler.heartbeat().evicted == ()
