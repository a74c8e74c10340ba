"""Throughput at saturation over that of the same tower without a server."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.checkpoints import model_path
from benchmarks.estimates import batch_aligned_rate, mean_batch
from benchmarks.load_generator import LoadPlan, Sample, Tally, run_load
from benchmarks.pictures import make_pictures
from benchmarks.raw import RawProcesses, raw_processes
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world

_BATCHES = (1, 2, 4, 8)
_SIDES = {"qwen-1280": 168}
_SIDE = 224
_MIN_MEAN_BATCH = 4.0


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    towers: tuple[str, ...] = ("tiny", "siglip-base", "qwen-1280")
    dp: tuple[int, ...] = (1, 2)
    clients: int = 32
    seconds: float = 3.5


@dataclass(frozen=True)
class _Result:
    """Items per second; the raw rates before and after the served run."""

    batch: int
    whole: tuple[float, float]
    overlapped: tuple[float, float]
    served: float
    mean_batch: float
    cpu_ms: Mapping[str, float]

    def over(self, raw: tuple[float, float]) -> float:
        return self.served / statistics.mean(raw)


def run(options: Options) -> Report:
    results: dict[tuple[str, int], _Result] = {}
    for tower in options.towers:
        batch = None
        for dp in options.dp:
            results[tower, dp] = _measure(tower, dp, batch, options)
            batch = results[tower, dp].batch
    checks: list[Check] = []
    rows: list[Sequence[Cell]] = []
    for (tower, dp), r in results.items():
        where = f"{tower}, DP = {dp}"
        checks += [
            Check(name=f"{where}: served over raw", measured=r.over(r.whole)),
            Check(name=f"{where}: served over raw, prepared beside", measured=r.over(r.overlapped)),
            Check(name=f"{where}: mean batch", measured=r.mean_batch, target=_MIN_MEAN_BATCH, at_least=True),
        ]
        again = r.whole[1] / r.whole[0]
        rates = [statistics.mean(r.whole), statistics.mean(r.overlapped), r.served]
        rows.append([where, r.batch, *rates, r.over(r.whole), r.over(r.overlapped), again, r.mean_batch])
    columns = ["tower", "raw's batch", "raw /s", "raw prepared beside /s", "served /s", "served/raw"]
    columns += ["served/prepared beside", "raw/raw", "mean batch"]
    bars = {
        "served / raw": [(f"{t} DP{dp}", r.over(r.whole)) for (t, dp), r in results.items()],
        "served / raw, prepared beside": [(f"{t} DP{dp}", r.over(r.overlapped)) for (t, dp), r in results.items()],
    }
    figures: dict[str, Any] = {f"{t} dp={dp}": {"cpu_ms_per_item": dict(r.cpu_ms)} for (t, dp), r in results.items()}
    return Report(
        checks=checks,
        tables=[Table(f"Items per second at {options.clients} clients", columns, rows)],
        plots=[
            Plot(kind="bars", title="Served over raw", x_label="", y_label="ratio", series=bars, target=1.0),
        ],
        figures=figures,
    )


def _measure(tower: str, dp: int, batch: int | None, options: Options) -> _Result:
    """Raw, served, raw, one after another: nothing else of ours is at work. `batch`: raw's best, where it is known."""
    side = side_of(tower)
    pictures = make_pictures([(side, side)], 32)
    path = model_path(tower)
    with (
        raw_processes(path, pictures, count=dp, device=options.device) as raw,
        world(path, "--cache-bytes", "0", dp=dp, device=options.device) as served,
    ):
        batch = batch or raw.best_batch(_BATCHES)
        item_s = raw.first("whole", batch=batch, items=batch)["wall_s"] / batch
        items = batch * max(1, round(options.seconds / item_s / batch))
        raw.ask("overlapped", batch=batch, items=batch)
        before = _raw(raw, batch, items)
        # The first and the last answers of the closed loop are not counted: two more batches of each replica.
        num_requests = options.clients + dp * max(2 * max(_BATCHES), items)
        rate, mean, cpu_ms = _served(served, pictures, num_requests, options.clients)
        after = _raw(raw, batch, items)
    whole, overlapped = zip(before, after, strict=True)
    return _Result(batch, whole, overlapped, rate, mean, cpu_ms)


def _raw(raw: RawProcesses, batch: int, items: int) -> tuple[float, float]:
    return raw.rate("whole", batch=batch, items=items), raw.rate("overlapped", batch=batch, items=items)


def _served(
    served: World, pictures: Sequence[bytes], num_requests: int, clients: int
) -> tuple[float, float, dict[str, float]]:
    """(items per second, mean batch, CPU milliseconds per item by role)."""
    plan = LoadPlan(pools=[pictures], clients=clients, num_requests=num_requests)
    asyncio.run(run_load(served.url, replace(plan, num_requests=8)))
    served.settle()
    batches = served.batches()
    with served.spending() as spent:
        tally = asyncio.run(run_load(served.url, plan))
    if tally.errors():
        raise RuntimeError(f"the server refused work: {tally.errors()}")
    served.settle()
    cpu_ms = {role: round(1e3 * s / num_requests, 3) for role, s in spent.items()}
    cpu_ms["load generator"] = round(1e3 * tally.own_cpu_s / num_requests, 3)
    return replicas_rate(tally), mean_batch(served.batches() - batches), cpu_ms


def side_of(tower: str) -> int:
    """Of the square pictures that a tower is measured with, in pixels."""
    return _SIDES.get(tower, _SIDE)


def replicas_rate(tally: Tally) -> float:
    """Items per second of all replicas together, each counted between the ends of its own batches."""
    by_replica: dict[str, list[Sample]] = {}
    for sample in tally.good():
        by_replica.setdefault(sample.replica, []).append(sample)
    return sum(
        batch_aligned_rate([(s.ended, s.stages_ms["forward"] / 1e3) for s in own]) for own in by_replica.values()
    )


SCENARIO = Scenario(
    name="saturation",
    about="Throughput at 32 clients over the same tower's without a server, per thread; and the batches' mean size.",
    full=Options(),
    quick=Options(towers=("tiny",), seconds=1.0),
    run=run,
)
