"""A thousand requests at the same moment: every one has its answer, and the memory stays bounded."""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.checkpoints import model_path
from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.load_generator.requests import unlike
from benchmarks.pictures import make_pictures
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world
from spmd_encoder.client import AsyncClient, ChunkLimits

_DP = 2
# What a world may grow by at most: this, and so many times the bytes of all bodies together.
_GROWTH_MIB = 64.0
_GROWTH_BODIES = 4
# A look at all processes takes tens of milliseconds.
_SAMPLE_S = 0.5
_WARM_UP = 200
_RETRIES_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: str = "tiny"
    requests: int = 1000
    limit: int = 100


def run(options: Options) -> Report:
    path, pools = model_path(options.tower), [make_pictures([(224, 224)], 32)]
    burst = LoadPlan(pools=pools, clients=options.requests, num_requests=options.requests)
    arms: dict[str, tuple[collections.Counter[str], float, float]] = {}
    with world(path, dp=_DP, device=options.device) as served:
        arms["default limits"] = _burst(served, burst)
    with world(path, "--max-queued-items", str(options.limit), dp=_DP, device=options.device) as served:
        arms[f"{options.limit} items in hand"] = _burst(served, burst)
        arms["the client tries again"] = _with_retries(served, pools[0], options.requests)
    bound = _GROWTH_MIB + _GROWTH_BODIES * sum(map(len, pools[0])) / len(pools[0]) * options.requests / 2**20
    (default, _, _), (limited, _, _), (retried, _, _) = arms.values()
    refused = limited["QUEUE_FULL"]
    rows: list[Sequence[Cell]] = [
        [
            name,
            outcomes["OK"],
            outcomes["QUEUE_FULL"],
            outcomes.total() - outcomes["OK"] - outcomes["QUEUE_FULL"],
            s,
            mib,
        ]
        for name, (outcomes, s, mib) in arms.items()
    ]
    total = options.requests
    return Report(
        checks=[
            Check(name=f"default limits: 200, of {total}", measured=default["OK"], target=total, at_least=True),
            Check(
                name=f"limited: 200 or 429, of {total}", measured=limited["OK"] + refused, target=total, at_least=True
            ),
            Check(name="limited: 429", measured=refused),
            Check(name=f"with retries: 200, of {total}", measured=retried["OK"], target=total, at_least=True),
            Check(
                name="memory at most above before", measured=max(a[2] for a in arms.values()), target=bound, unit="MiB"
            ),
        ],
        tables=[Table(f"{total} at once", ["", "200", "429", "other", "seconds", "PSS above before MiB"], rows)],
        plots=[
            Plot(
                kind="bars",
                title="Memory above before",
                x_label="",
                y_label="MiB",
                series={"PSS": [(name, mib) for name, (_, _, mib) in arms.items()]},
                target=bound,
            )
        ],
    )


def _burst(served: World, plan: LoadPlan) -> tuple[collections.Counter[str], float, float]:
    """(outcomes by code, seconds, MiB of growth). A world's first batches make it grow, whatever comes."""
    asyncio.run(run_load(served.url, replace(plan, clients=32, num_requests=_WARM_UP, seed=1)))
    with _memory_peak(served) as growth:
        tally = asyncio.run(run_load(served.url, plan))
    return collections.Counter(sample.code for sample in tally.samples), tally.wall_s, growth["mib"]


def _with_retries(
    served: World, pictures: Sequence[bytes], requests: int
) -> tuple[collections.Counter[str], float, float]:
    """The same by our own client, which waits as it is told and sends again."""
    outcomes: collections.Counter[str] = collections.Counter()

    async def all_at_once() -> None:
        limits = ChunkLimits(items=1)
        async with AsyncClient(served.url, concurrency=requests, limits=limits, timeout_s=_RETRIES_S) as client:
            # Unlike those of the burst before, which a cache may hold.
            files = (unlike(pictures[n % len(pictures)], n, seed=2) for n in range(requests))
            for result in await client.encode(files, raise_on_error=False):
                outcomes["OK" if result.error is None else result.error.code] += 1

    began = time.perf_counter()
    with _memory_peak(served) as growth:
        asyncio.run(all_at_once())
    return outcomes, time.perf_counter() - began, growth["mib"]


@contextmanager
def _memory_peak(served: World) -> Iterator[dict[str, Any]]:
    """The largest sum of the world's PSS (without the launcher's) while the block runs, less that before it."""
    growth: dict[str, Any] = {"mib": 0.0}
    over = threading.Event()
    before = served.server.total_pss()

    def look() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_SAMPLE_S)
            growth["mib"] = max(growth["mib"], (served.server.total_pss() - before) / 2**20)

    looking = threading.Thread(target=look, name="memory")
    looking.start()
    try:
        yield growth
    finally:
        over.set()
        looking.join()


SCENARIO = Scenario(
    name="burst",
    about="1,000 at once at DP = 2: all 200 by default; with a small limit 200 or 429, and with retries all 200.",
    full=Options(),
    quick=Options(requests=200, limit=20),
    run=run,
)
