"""Pictures of very unequal sizes, all at once, over two replicas: how well the work is spread."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Tower, model_path
from benchmarks.estimates import greedy_makespan
from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.pictures import make_pictures
from benchmarks.raw import raw_processes
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world

_TARGET = 1.1
_DP = 2
# Of side (pixels): this many in a hundred. The largest takes some fifteen times the smallest's work.
_SIDES = {112: 80, 224: 15, 448: 5}


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: Tower = "mid"
    items: int = 200
    orders: int = 3


def run(options: Options) -> Report:
    """Singles, then the rounds, then singles again: an item's own time is the mean of its two."""
    sides = [side for side, share in _SIDES.items() for _ in range(max(1, share * options.items // 100))]
    pictures = make_pictures([(side, side) for side in sides], len(sides))
    path = model_path(options.tower)
    everything = list(range(len(pictures)))
    orders = [random.Random(seed).sample(everything, len(everything)) for seed in range(options.orders)]
    with (
        raw_processes(path, pictures, device=options.device) as raw,
        world(path, "--cache-bytes", "0", dp=_DP, device=options.device) as served,
    ):
        before = raw.first("singles", items=everything)["wall_s"]
        _makespan(served, pictures[:: max(1, len(pictures) // 20)])
        taken = [_makespan(served, [pictures[index] for index in order]) for order in orders]
        after = raw.first("singles", items=everything)["wall_s"]
    own = [statistics.mean(both) for both in zip(before, after, strict=True)]
    ideal = sum(own) / _DP
    ratios = [seconds / ideal for seconds in taken]
    greedy = [greedy_makespan([own[index] for index in order], _DP) / ideal for order in orders]
    rows: list[Sequence[Cell]] = [
        [str(number), seconds, ratio, bound]
        for number, (seconds, ratio, bound) in enumerate(zip(taken, ratios, greedy, strict=True))
    ]
    return Report(
        checks=[Check(name="makespan over half of all own times", measured=statistics.median(ratios), target=_TARGET)],
        tables=[
            Table(
                f"{len(pictures)} pictures of {', '.join(f'{s} px ({n} %)' for s, n in _SIDES.items())}; "
                f"half of their own times is {ideal:.3g} s",
                ["order", "makespan s", "over half of own times", "the same, if each went to whoever was free first"],
                rows,
            )
        ],
        plots=[
            Plot(
                kind="bars",
                title="Makespan over half of all own times",
                x_label="random order",
                y_label="ratio",
                series={
                    "served": [(str(n), ratio) for n, ratio in enumerate(ratios)],
                    "raw, first free": [(str(n), bound) for n, bound in enumerate(greedy)],
                },
                target=_TARGET,
            )
        ],
        figures={"own_s_first_pass": sum(before), "own_s_second_pass": sum(after)},
    )


def _makespan(served: World, pictures: Sequence[bytes]) -> float:
    """Seconds from the first request to the last answer, all of them sent at once, in order."""
    plan = LoadPlan(pools=[pictures], clients=len(pictures), num_requests=len(pictures))
    tally = asyncio.run(run_load(served.url, plan))
    if tally.errors():
        raise RuntimeError(f"the server refused work: {tally.errors()}")
    return tally.wall_s


SCENARIO = Scenario(
    name="mixed-sizes",
    about="Unequal pictures at once, in random order, at DP = 2: the time for all over half of the sum of their own.",
    full=Options(),
    quick=Options(items=40, orders=1),
    run=run,
)
