"""What a rank holds in memory beside one plain process with torch, transformers and the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import Tower, model_path
from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.pictures import make_pictures
from benchmarks.processes import file_pages, memory_of
from benchmarks.raw import raw_processes
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world

_TARGET = 1.15


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    towers: tuple[Tower, ...] = ("tiny", "siglip-base")
    dp: tuple[int, ...] = (1, 2)
    requests: int = 8
    """Encoded before anybody looks."""


def run(options: Options) -> Report:
    """This process has no torch: shared pages of it would be split with whoever is measured."""
    checks, rows = [], []
    series: dict[str, list[tuple[Cell, float]]] = {}
    figures: dict[str, Any] = {}
    pictures = make_pictures([(224, 224)], 16)
    for tower in options.towers:
        path = model_path(tower)
        with raw_processes(path, pictures, device=options.device) as raw:
            bare = raw.first("memory")
        figures[tower] = {"bare": bare}
        for dp in options.dp:
            with world(path, dp=dp, device=options.device) as served:
                plan = LoadPlan(pools=[pictures], clients=4, num_requests=options.requests * dp)
                asyncio.run(run_load(served.url, plan))
                found = _memory(served)
            each = found["pss"] / dp
            worker = found["worker_rss"] / dp
            checks.append(
                Check(
                    name=f"{tower}, {dp} ranks: PSS per rank over a bare process",
                    measured=each / bare["Pss"],
                    target=_TARGET,
                )
            )
            once = found["once"] / dp / bare["Rss"]
            checks.append(Check(name=f"{tower}, {dp} ranks: every page once, per rank over bare RSS", measured=once))
            rows.append(_row(tower, dp, bare, each, worker, found))
            series.setdefault(tower, []).append((f"{dp} ranks", each / bare["Pss"]))
            figures[tower][f"dp={dp}"] = found
    columns = ["tower", "ranks", "bare PSS MiB", "PSS per rank MiB", "over bare", "bare RSS MiB", "worker's RSS MiB"]
    columns += ["over bare", "of PSS: keepers", "nursery", "workers", "preparers", "launcher (not counted)"]
    return Report(
        checks=checks,
        tables=[Table("Memory after some forwards", columns, rows)],
        plots=[
            Plot(
                kind="bars", title="PSS per rank over bare", x_label="", y_label="ratio", series=series, target=_TARGET
            )
        ],
        figures=figures,
    )


def _memory(served: World) -> dict[str, Any]:
    """Bytes: PSS of all but the launcher, and by role; the sum of the workers' RSS; every page of all but the launcher
    once, whoever else maps it: of a file as many as the process has that has most of them."""
    by_role: dict[str, int] = {}
    files: dict[str, int] = {}
    worker_rss = anonymous = 0
    for role, process in served.server.members():
        memory = memory_of(process.pid)
        by_role[role] = by_role.get(role, 0) + memory["Pss"]
        worker_rss += memory["Rss"] if role == "worker" else 0
        if role != "launcher":
            anonymous += memory["PssAnon"]
            for path, size in file_pages(Path(f"/proc/{process.pid}/smaps").read_text()).items():
                files[path] = max(files.get(path, 0), size)
    return {
        "pss": sum(n for role, n in by_role.items() if role != "launcher"),
        "worker_rss": worker_rss,
        "once": anonymous + sum(files.values()),
        "by_role": by_role,
    }


def _row(
    tower: str, dp: int, bare: dict[str, Any], each: float, worker: float, found: dict[str, Any]
) -> Sequence[Cell]:
    mib = 2**20
    roles = [round(found["by_role"].get(r, 0) / mib) for r in ("keeper", "nursery", "worker", "preparer", "launcher")]
    pss: list[Cell] = [round(bare["Pss"] / mib), round(each / mib), each / bare["Pss"]]
    rss: list[Cell] = [round(bare["Rss"] / mib), round(worker / mib), worker / bare["Rss"]]
    return [tower, dp, *pss, *rss, *roles]


SCENARIO = Scenario(
    name="memory",
    about="PSS of everything but torchrun's agent, per rank, over one bare process with the same weights.",
    full=Options(),
    quick=Options(towers=("tiny",), dp=(1, 2)),
    run=run,
)
