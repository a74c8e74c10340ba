"""A line per second on a terminal, while a load runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TextIO

from benchmarks.load_generator.tally import OK, Sample, Tally, latency_ms


@dataclass(frozen=True)
class Progress:
    """Writes to `out` every `every_s` seconds, over its last line where `out` is a terminal."""

    out: TextIO
    every_s: float = 1.0

    async def tell(self, tally: Tally) -> None:
        """Until cancelled."""
        began, told = time.perf_counter(), 0
        begin, end = ("\r", "") if self.out.isatty() else ("", "\n")
        try:
            while True:
                await asyncio.sleep(self.every_s)
                fresh = tally.samples[told:]
                told += len(fresh)
                line = status_line(time.perf_counter() - began, told, fresh, self.every_s)
                self.out.write(f"{begin}{line:<100}{end}")
                self.out.flush()
        finally:
            if end == "":
                self.out.write("\n")


def status_line(elapsed_s: float, num_answered: int, fresh: list[Sample], over_s: float) -> str:
    """What happened in the last `over_s` seconds."""
    good = [s for s in fresh if s.code == OK and not s.chaos]
    bad = sum(s.code != OK and not s.chaos for s in fresh)
    times = latency_ms(s.latency for s in good)
    shown = f"p50 {times['p50']:.1f} ms, p99 {times['p99']:.1f} ms" if times else "no answers"
    return f"{elapsed_s:6.1f} s: {num_answered} answered, {len(good) / over_s:.1f}/s, {shown}, {bad} errors"
