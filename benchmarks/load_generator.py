"""Load on a server: closed loop (so many callers, each waits) or open loop (arrivals that wait for nobody)."""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_encoder.client import AsyncClient, ChunkLimits, EncoderClientError, ItemsFailedError, RefusedError

_MOST_OUTSTANDING = 4096


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """`rate` (requests per second, Poisson) makes the loop open, else `concurrency` callers close it. It ends after
    `duration_s` or `num_requests`, whichever is given first and comes first."""

    pictures: Sequence[bytes]
    items_per_request: int = 1
    output: Any = None
    concurrency: int = 16
    rate: float | None = None
    duration_s: float = 10.0
    num_requests: int | None = None
    seed: int = 0


@dataclass
class Tally:
    """Seconds of each answered request; errors by code; in the open loop, arrivals that were dropped here."""

    latencies_s: list[float] = field(default_factory=list)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    wall_s: float = 0.0
    own_cpu_s: float = 0.0

    def report(self, items_per_request: int) -> dict[str, Any]:
        answered = len(self.latencies_s)
        quantiles = np.percentile(self.latencies_s, [50, 90, 99]) * 1000 if answered else [float("nan")] * 3
        return {
            "requests": answered,
            "errors": dict(self.errors),
            "wall_s": round(self.wall_s, 3),
            "requests_per_s": round(answered / self.wall_s, 2),
            "items_per_s": round(answered * items_per_request / self.wall_s, 2),
            **{f"p{p}_ms": round(float(ms), 2) for p, ms in zip((50, 90, 99), quantiles, strict=True)},
            "generator_cpu_s": round(self.own_cpu_s, 3),
        }


async def run_load(url: str, plan: LoadPlan) -> Tally:
    """One measurement. A refusal counts by its code and is not tried again."""
    slots = plan.concurrency if plan.rate is None else _MOST_OUTSTANDING
    limits = ChunkLimits(items=plan.items_per_request, num_bytes=2**40)
    tally = Tally()
    async with AsyncClient(url, retries=0, concurrency=slots, limits=limits) as client:
        started, cpu = time.perf_counter(), os.times()
        if plan.rate is None:
            await _closed(client, plan, tally)
        else:
            await _open(client, plan, plan.rate, tally)
        ended, cpu_end = time.perf_counter(), os.times()
    tally.wall_s = ended - started
    tally.own_cpu_s = cpu_end.user + cpu_end.system - cpu.user - cpu.system
    return tally


async def _closed(client: AsyncClient, plan: LoadPlan, tally: Tally) -> None:
    turns = _turns(plan)
    end = time.perf_counter() + plan.duration_s

    async def caller() -> None:
        for pictures in turns:  # shared: each turn is one caller's
            began = time.perf_counter()
            if began >= end:
                return
            await _one(client, pictures, plan, began, tally)

    await asyncio.gather(*(caller() for _ in range(plan.concurrency)))


async def _open(client: AsyncClient, plan: LoadPlan, rate: float, tally: Tally) -> None:
    """Latency counts from when a request was due, so that a slow server cannot hide by being asked less."""
    rng = random.Random(plan.seed)
    due = time.perf_counter()
    end = due + plan.duration_s
    running: set[asyncio.Task[None]] = set()
    for pictures in _turns(plan):
        due += rng.expovariate(rate)
        if due >= end:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if len(running) >= _MOST_OUTSTANDING:
            tally.errors["NOT_SENT"] += 1
            continue
        task = asyncio.create_task(_one(client, pictures, plan, due, tally))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


def _turns(plan: LoadPlan) -> Iterator[list[bytes]]:
    """The pictures of each request, in a circle, up to `num_requests`."""
    circle = itertools.cycle(plan.pictures)
    numbers = itertools.count() if plan.num_requests is None else range(plan.num_requests)
    for _ in numbers:
        yield list(itertools.islice(circle, plan.items_per_request))


async def _one(client: AsyncClient, pictures: list[bytes], plan: LoadPlan, began: float, tally: Tally) -> None:
    try:
        await client.encode(pictures, output=plan.output)
    except ItemsFailedError as error:
        tally.errors[error.errors[0].code] += 1
    except RefusedError as error:
        tally.errors[error.code] += 1
    except EncoderClientError as error:
        tally.errors[type(error).__name__] += 1
    else:
        tally.latencies_s.append(time.perf_counter() - began)
