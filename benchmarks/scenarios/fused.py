"""Whether a batch costs no more than its items alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Tower, model_path
from benchmarks.pictures import make_pictures
from benchmarks.raw import raw_processes
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.scenarios.saturation import side_of

_TARGET = 1.02


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    towers: tuple[Tower, ...] = ("tiny", "siglip-base", "qwen-1280")
    pairs: int = 9
    batch: int = 4


def run(options: Options) -> Report:
    """CPU time of the same process, so that others' load is not in it."""
    checks: list[Check] = []
    rows: list[Sequence[Cell]] = []
    series: dict[str, list[tuple[Cell, float]]] = {}
    for tower in options.towers:
        side = side_of(tower)
        pictures = make_pictures([(side, side)], options.batch)
        with raw_processes(model_path(tower), pictures, device=options.device) as raw:
            taken = raw.first("pairs", batch=options.batch, pairs=options.pairs)
        single, fused = taken["single_cpu_s"], taken["fused_cpu_s"]
        ratios = [b / a for a, b in zip(single, fused, strict=True)]
        checks.append(
            Check(
                name=f"{tower}: fused over singles, CPU per picture", measured=statistics.median(ratios), target=_TARGET
            )
        )
        ms = [1e3 * statistics.median(values) / options.batch for values in (single, fused)]
        rows.append([tower, *ms, statistics.median(ratios), min(ratios), max(ratios)])
        series[tower] = [(number, ratio) for number, ratio in enumerate(ratios)]
    columns = ["tower", "alone ms", "fused ms", "ratio, median of pairs", "least", "most"]
    return Report(
        checks=checks,
        tables=[
            Table(f"CPU milliseconds per picture, {options.pairs} pairs, batches of {options.batch}", columns, rows)
        ],
        plots=[
            Plot(
                kind="lines",
                title="Fused over singles",
                x_label="pair",
                y_label="CPU ratio",
                series=series,
                target=_TARGET,
            )
        ],
    )


SCENARIO = Scenario(
    name="fused",
    about="A batch's CPU time per picture over the same pictures' one by one, in alternating pairs.",
    full=Options(),
    quick=Options(towers=("tiny",), pairs=3),
    run=run,
)
