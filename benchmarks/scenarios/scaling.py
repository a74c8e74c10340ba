"""What a second rank gains: as a second replica, and as the second half of one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.checkpoints import Tower, model_path
from benchmarks.connection import Connection
from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.load_generator.tally import percentile
from benchmarks.pictures import make_pictures
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.scenarios.saturation import replicas_rate
from benchmarks.world import World, world

_SHAPES = ((1, 1), (2, 1), (1, 2))
_SIDE = 224


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: Tower = "mid"
    clients: int = 32
    requests: int = 160
    """At saturation, on one rank; twice as many on two."""
    singles: int = 30


def run(options: Options) -> Report:
    """Every rank has one compute thread."""
    pictures = make_pictures([(_SIDE, _SIDE)], 32)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for dp, tp in _SHAPES:
        with world(model_path(options.tower), "--cache-bytes", "0", dp=dp, tp=tp, device=options.device) as served:
            found[dp, tp] = _measure(served, pictures, options)
    one, dp2, tp2 = (found[shape] for shape in _SHAPES)
    rows: list[Sequence[Cell]] = [
        [f"DP {dp}, TP {tp}", f["per_s"], f["p50_ms"], f["cpu_ms"], f["worker_cpu_ms"], f["cores"]]
        for (dp, tp), f in found.items()
    ]
    columns = ["world", "items/s", "p50 ms, one client", "server CPU ms per item", "workers' of it", "cores in use"]
    labels = {shape: f"DP {shape[0]}, TP {shape[1]}" for shape in _SHAPES}
    return Report(
        checks=[
            Check(name="items/s, DP = 2 over DP = 1", measured=dp2["per_s"] / one["per_s"]),
            Check(name="items/s, TP = 2 over TP = 1", measured=tp2["per_s"] / one["per_s"]),
            Check(name="p50 of one client, TP = 2 over TP = 1", measured=tp2["p50_ms"] / one["p50_ms"]),
            Check(
                name="workers' CPU per item, DP = 2 over DP = 1", measured=dp2["worker_cpu_ms"] / one["worker_cpu_ms"]
            ),
            Check(
                name="workers' CPU per item, TP = 2 over TP = 1", measured=tp2["worker_cpu_ms"] / one["worker_cpu_ms"]
            ),
        ],
        tables=[Table(f"Tower {options.tower}, {_SIDE} px, {options.clients} clients", columns, rows)],
        plots=[
            Plot(
                kind="bars",
                title=f"{title}, over one rank's",
                x_label="",
                y_label="ratio",
                series={title: [(labels[shape], f[key] / one[key]) for shape, f in found.items()]},
            )
            for title, key in (("Items per second", "per_s"), ("Latency of one client", "p50_ms"))
        ],
        figures={labels[shape]: f for shape, f in found.items()},
    )


def _measure(served: World, pictures: Sequence[bytes], options: Options) -> dict[str, Any]:
    plan = LoadPlan(pools=[pictures], clients=options.clients, num_requests=options.requests * served.ranks)
    asyncio.run(run_load(served.url, replace(plan, num_requests=8)))
    with Connection(served.url) as connection:
        seconds = [connection.encode(pictures[n % len(pictures)]).seconds for n in range(options.singles)]
    with served.spending() as spent:
        tally = asyncio.run(run_load(served.url, plan))
    if tally.errors():
        raise RuntimeError(f"the server refused work: {tally.errors()}")
    num_items = len(tally.good())
    return {
        "per_s": replicas_rate(tally),
        "p50_ms": 1e3 * percentile(sorted(seconds), 50),
        "cpu_ms": 1e3 * sum(spent.values()) / num_items,
        "worker_cpu_ms": 1e3 * spent["worker"] / num_items,
        "cores": (sum(spent.values()) + tally.own_cpu_s) / tally.wall_s,
        "cpu_s_by_role": spent,
    }


SCENARIO = Scenario(
    name="scaling",
    about="DP 1 and 2, TP 1 and 2, one compute thread per rank: rates at 32 clients, latency of one, CPU per item.",
    full=Options(),
    quick=Options(requests=32, singles=5),
    run=run,
)
