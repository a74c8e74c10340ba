"""CPU time that the server takes beyond its model, per request."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.bare_server import bare_server
from benchmarks.checkpoints import Tower, model_path
from benchmarks.cold_caches import cold_over_warm
from benchmarks.connection import Connection
from benchmarks.estimates import cpu_at_sizes, mean_batch
from benchmarks.load_generator import Arrivals, LoadPlan, run_load
from benchmarks.load_generator.tally import latency_ms
from benchmarks.pictures import make_pictures
from benchmarks.raw import RawProcesses, raw_processes
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import world

_TARGET_MS = 1.0


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: Tower = "tiny"
    requests: int = 5000
    rate: float = 80.0
    raw_items: int = 160
    """Of each batch size, before and again after the served run."""
    bare_requests: int = 800
    """To a route that only reads a picture and answers as many bytes, and items of the raw tower at the same rate."""


def run(options: Options) -> Report:
    """(CPU of the whole world over the run - CPU that its very forwards and preparations take raw) / requests."""
    pictures = make_pictures([(224, 224)], 32)
    path = model_path(options.tower)
    plan = LoadPlan(
        pools=[pictures], rate=options.rate, arrivals=Arrivals.FIXED, num_requests=options.requests, duration_s=1e9
    )
    with (
        raw_processes(path, pictures, device=options.device) as raw,
        world(path, "--cache-bytes", "0", device=options.device) as served,
    ):
        asyncio.run(run_load(served.url, replace(plan, num_requests=100)))
        before = _raw_cpu_s(raw, options.raw_items)
        served.settle()
        batches = served.batches()
        with served.spending() as spent:
            tally = asyncio.run(run_load(served.url, plan))
        served.settle()
        batches = served.batches() - batches
        after = _raw_cpu_s(raw, options.raw_items)
        pace = raw.first("whole", batch=1, items=options.bare_requests, rate=options.rate)
        with Connection(served.url) as connection:
            reply_bytes = len(connection.encode(pictures[0]).body)
    http_ms = _http_cpu_ms(replace(plan, num_requests=options.bare_requests), reply_bytes)
    walk, compute = cold_over_warm(1 / options.rate)
    paced_ms = 1e3 * float(pace["cpu_s"]) / options.bare_requests
    if tally.errors():
        raise RuntimeError(f"the server refused work: {tally.errors()}")
    own = {size: statistics.mean((before[size], after[size])) for size in before}
    whole_ms = 1e3 * sum(spent.values()) / options.requests
    model_ms = 1e3 * cpu_at_sizes(batches, own) / options.requests
    rows: list[Sequence[Cell]] = [[role, 1e3 * seconds / options.requests] for role, seconds in spent.items()]
    rows += [["all", whole_ms], ["the same items, raw", model_ms], ["beyond the model", whole_ms - model_ms]]
    return Report(
        checks=[
            Check(name="CPU beyond the model, per request", measured=whole_ms - model_ms, target=_TARGET_MS, unit="ms"),
            Check(name="the same over the model's CPU", measured=(whole_ms - model_ms) / model_ms),
            Check(name="beyond the raw tower at this rate, one by one", measured=whole_ms - paced_ms, unit="ms"),
            Check(name="a FastAPI route alone, same bodies and rate", measured=http_ms, unit="ms"),
            Check(name="any program: 6,000 objects read after such a pause over the same in a loop", measured=walk),
            Check(name="any program: 6,000 sums after such a pause over the same in a loop", measured=compute),
        ],
        tables=[
            Table(f"CPU milliseconds per request, {options.requests} at {options.rate:g}/s", ["", "ms"], rows),
            Table(
                f"Batches: {mean_batch(batches):.2f} items on average",
                ["items", "forwards", "raw CPU ms per item, before", "after"],
                [[n, batches[n], 1e3 * before[n], 1e3 * after[n]] for n in sorted(batches)],
            ),
        ],
        plots=[
            Plot(
                kind="bars",
                title="CPU per request",
                x_label="",
                y_label="ms",
                series={"CPU": [(str(name), float(ms)) for name, ms in rows]},
            )
        ],
        figures={
            "latency_ms": latency_ms(s.latency for s in tally.good()),
            "sent_late_ms": latency_ms(s.sent - s.due for s in tally.good()),
            "items_in_batches": sum(n * count for n, count in batches.items()),
        },
    )


def _http_cpu_ms(plan: LoadPlan, reply_bytes: int) -> float:
    """Milliseconds per request of a server that does nothing else."""
    with bare_server(reply_bytes) as server:
        asyncio.run(run_load(server.url, replace(plan, num_requests=100)))
        before = server.cpu_s()
        tally = asyncio.run(run_load(server.url, plan))
        spent = server.cpu_s() - before
    if tally.errors():
        raise RuntimeError(f"the bare server failed: {tally.errors()}")
    return 1e3 * spent / len(tally.good())


def _raw_cpu_s(raw: RawProcesses, items: int) -> dict[int, float]:
    """CPU seconds per item, decode and preprocess included, at every batch size that a server may form by default."""
    return {
        size: raw.first("whole", batch=size, items=items // size * size)["cpu_s"] / (items // size * size)
        for size in range(1, 9)
    }


SCENARIO = Scenario(
    name="overhead",
    about="At a fixed rate: the whole world's CPU per request less what the same batches take without a server.",
    full=Options(),
    quick=Options(requests=300, raw_items=48, bare_requests=100),
    run=run,
)
