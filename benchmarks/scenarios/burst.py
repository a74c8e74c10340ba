"""Many requests at the same moment: every one has its answer, and the memory stays bounded."""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.checkpoints import Tower, model_path
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
    tower: Tower = "tiny"
    requests: int = 1000
    limit: int = 100


@dataclass(frozen=True)
class _Arm:
    """Outcomes by code, seconds until the last, MiB of growth by role."""

    outcomes: collections.Counter[str]
    seconds: float
    growth_by_role: Mapping[str, float]

    @property
    def growth(self) -> float:
        return sum(self.growth_by_role.values())


def run(options: Options) -> Report:
    path, pools = model_path(options.tower), [make_pictures([(224, 224)], 32)]
    burst = LoadPlan(pools=pools, clients=options.requests, num_requests=options.requests)
    arms: dict[str, _Arm] = {}
    with world(path, dp=_DP, device=options.device) as served:
        arms["default limits"] = _burst(served, burst)
    with world(path, "--max-queued-items", str(options.limit), dp=_DP, device=options.device) as served:
        arms[f"{options.limit} items in hand"] = _burst(served, burst)
        arms["the client tries again"] = _with_retries(served, pools[0], options.requests)
    bound = _GROWTH_MIB + _GROWTH_BODIES * sum(map(len, pools[0])) / len(pools[0]) * options.requests / 2**20
    default, limited, retried = (arm.outcomes for arm in arms.values())
    refused, total = limited["QUEUE_FULL"], options.requests
    rows: list[Sequence[Cell]] = []
    for name, arm in arms.items():
        ok, full = arm.outcomes["OK"], arm.outcomes["QUEUE_FULL"]
        rows.append([name, ok, full, arm.outcomes.total() - ok - full, arm.seconds, arm.growth])
    most = max(arm.growth for arm in arms.values())
    return Report(
        checks=[
            Check(name=f"default limits: 200, of {total}", measured=default["OK"], target=total, at_least=True),
            Check(
                name=f"limited: 200 or 429, of {total}", measured=limited["OK"] + refused, target=total, at_least=True
            ),
            Check(name="limited: 429", measured=refused),
            Check(name=f"with retries: 200, of {total}", measured=retried["OK"], target=total, at_least=True),
            Check(name="memory at most above before", measured=most, target=bound, unit="MiB"),
        ],
        tables=[Table(f"{total} at once", ["", "200", "429", "other", "seconds", "memory above before MiB"], rows)],
        plots=[
            Plot(
                kind="bars",
                title="Memory above before",
                x_label="",
                y_label="MiB",
                series={"world": [(name, arm.growth) for name, arm in arms.items()]},
                target=bound,
            )
        ],
        figures={name: {"growth_mib_by_role": arm.growth_by_role} for name, arm in arms.items()},
    )


def _burst(served: World, plan: LoadPlan) -> _Arm:
    """A world's first batches make it grow, whatever comes: so there are some before."""
    asyncio.run(run_load(served.url, replace(plan, clients=32, num_requests=_WARM_UP, seed=1)))
    with _memory_peak(served) as growth:
        tally = asyncio.run(run_load(served.url, plan))
    return _Arm(collections.Counter(sample.code for sample in tally.samples), tally.wall_s, growth)


def _with_retries(served: World, pictures: Sequence[bytes], requests: int) -> _Arm:
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
    return _Arm(outcomes, time.perf_counter() - began, growth)


@contextmanager
def _memory_peak(served: World) -> Iterator[dict[str, float]]:
    """MiB by role: the world's memory when it had most of it while the block ran, less that before the block.

    Pages of files, which other users of the same libraries share, are not counted.
    """
    growth: dict[str, float] = {}
    over = threading.Event()
    before = served.server.pss_mib("PssAnon")

    def look() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_SAMPLE_S)
            now = served.server.pss_mib("PssAnon")
            grown = {role: round(mib - before.get(role, 0.0), 1) for role, mib in now.items()}
            if sum(grown.values()) > sum(growth.values()) or not growth:
                growth.update(grown)

    looking = threading.Thread(target=look, name="memory")
    looking.start()
    try:
        yield growth
    finally:
        over.set()
        looking.join()


SCENARIO = Scenario(
    name="burst",
    about="Many at once at DP = 2: all 200 by default; with a small limit 200 or 429, and with retries all 200.",
    full=Options(),
    quick=Options(requests=200, limit=20),
    run=run,
)
