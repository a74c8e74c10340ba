"""Throughput at saturation over that of the same tower without a server."""

from __future__ import annotations

import asyncio
import collections
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoints import Tower, model_path
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
_MIN_RATIO = 0.97
_LOOP = "scheduler_loop_cpu_seconds_total"


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    towers: tuple[Tower, ...] = ("tiny", "siglip-base", "qwen-1280")
    dp: tuple[int, ...] = (1, 2)
    clients: int = 32
    seconds: float = 3.5
    pairs: int = 3


@dataclass(frozen=True)
class _Result:
    """Items per second: raw, served, raw, served, ... raw. `loop_share`: of a processor, by a leader's loop thread."""

    batch: int
    whole: Sequence[float]
    overlapped: Sequence[float]
    served: Sequence[float]
    mean_batch: float
    loop_share: float
    cpu_ms: Mapping[str, float]

    def over(self, raw: Sequence[float]) -> list[float]:
        """Each served rate over the mean of the raw ones around it."""
        around = [statistics.mean(pair) for pair in itertools.pairwise(raw)]
        return [served / mean for served, mean in zip(self.served, around, strict=True)]

    def again(self) -> list[float]:
        """Equal things over each other."""
        return [later / earlier for earlier, later in itertools.pairwise(self.whole)]


def run(options: Options) -> Report:
    results: dict[tuple[Tower, int], _Result] = {}
    for tower in options.towers:
        batch = None
        for dp in options.dp:
            results[tower, dp] = _measure(tower, dp, batch, options)
            batch = results[tower, dp].batch
    checks: list[Check] = []
    rows: list[Sequence[Cell]] = []
    for (tower, dp), r in results.items():
        where = f"{tower}, DP = {dp}"
        target = None if tower == "tiny" else _MIN_RATIO
        ratio = statistics.median(r.over(r.whole))
        checks += [
            Check(name=f"{where}: served over raw", measured=ratio, target=target, at_least=True),
            Check(name=f"{where}: served over raw, prepared beside", measured=statistics.median(r.over(r.overlapped))),
            Check(name=f"{where}: mean batch", measured=r.mean_batch, target=_MIN_MEAN_BATCH, at_least=True),
            Check(name=f"{where}: a leader's loop, share of a processor", measured=r.loop_share),
        ]
        rates = [statistics.median(rates) for rates in (r.whole, r.overlapped, r.served)]
        ranges = [_range(r.over(r.whole)), _range(r.again())]
        rows.append([where, r.batch, *rates, ratio, *ranges, statistics.median(r.over(r.overlapped)), r.mean_batch])
    columns = ["tower", "raw's batch", "raw /s", "raw prepared beside /s", "served /s", "served/raw", "its range"]
    columns += ["raw/raw", "served/prepared beside", "mean batch"]
    bars = {
        "served / raw": [(f"{t} DP{dp}", statistics.median(r.over(r.whole))) for (t, dp), r in results.items()],
        "served / raw, prepared beside": [
            (f"{t} DP{dp}", statistics.median(r.over(r.overlapped))) for (t, dp), r in results.items()
        ],
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
        # The first and the last answers of the closed loop are not counted: two more batches of each replica.
        num_requests = options.clients + dp * max(2 * max(_BATCHES), items)
        asyncio.run(run_load(served.url, LoadPlan(pools=[pictures], clients=options.clients, num_requests=8)))
        raw_rates, served_runs = [_raw(raw, batch, items)], []
        for _ in range(options.pairs):
            served_runs.append(_served(served, pictures, num_requests, options.clients))
            raw_rates.append(_raw(raw, batch, items))
    whole, overlapped = zip(*raw_rates, strict=True)
    spent = collections.Counter[str]()
    for run_ in served_runs:
        spent.update(run_.spent)
    number = num_requests * options.pairs
    return _Result(
        batch,
        whole,
        overlapped,
        [run_.rate for run_ in served_runs],
        mean_batch(sum((run_.batches for run_ in served_runs), collections.Counter())),
        sum(run_.loop_s for run_ in served_runs) / sum(run_.wall_s for run_ in served_runs) / dp,
        {role: round(1e3 * s / number, 3) for role, s in spent.items()},
    )


def _raw(raw: RawProcesses, batch: int, items: int) -> tuple[float, float]:
    return raw.rate("whole", batch=batch, items=items), raw.rate("overlapped", batch=batch, items=items)


@dataclass(frozen=True)
class _Served:
    """One run: items per second, forwards by size, CPU seconds by role and of the leaders' loops, seconds."""

    rate: float
    batches: collections.Counter[int]
    spent: Mapping[str, float]
    loop_s: float
    wall_s: float


def _served(served: World, pictures: Sequence[bytes], num_requests: int, clients: int) -> _Served:
    served.settle()
    batches, loop_s = served.batches(), served.metric(_LOOP)
    began = time.perf_counter()
    with served.spending() as spent:
        tally = asyncio.run(
            run_load(served.url, LoadPlan(pools=[pictures], clients=clients, num_requests=num_requests))
        )
    wall_s = time.perf_counter() - began
    if tally.errors():
        raise RuntimeError(f"the server refused work: {tally.errors()}")
    served.settle()
    spent["load generator"] = tally.own_cpu_s
    return _Served(replicas_rate(tally), served.batches() - batches, spent, served.metric(_LOOP) - loop_s, wall_s)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


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
    quick=Options(towers=("tiny",), seconds=1.0, pairs=1),
    run=run,
)
LONG = Scenario(
    name="saturation-long",
    about="The same for one real-size tower, in seven pairs of ten seconds each.",
    full=Options(towers=("siglip-base",), seconds=10.0, pairs=7),
    quick=Options(towers=("siglip-base",), dp=(1,), seconds=2.0, pairs=1),
    run=run,
)
