"""Items that come again: what the cache and the joining of equal items in flight save."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoints import Tower, model_path
from benchmarks.connection import Connection, tensor_bytes
from benchmarks.load_generator import LoadPlan, run_load
from benchmarks.load_generator.mix import Turn
from benchmarks.load_generator.requests import unlike
from benchmarks.load_generator.tally import percentile
from benchmarks.pictures import make_pictures
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world

_HIT_MS = 3.0
_LEAST_RATIO = {"tiny": 5.0, "siglip-base": 50.0}
_JOINED = 32


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    towers: tuple[Tower, ...] = ("tiny", "siglip-base")
    percents: tuple[int, ...] = (0, 20, 50, 80, 95)
    clients: int = 8
    requests: int = 400
    slow_requests: int = 20
    """Of towers other than `tiny`."""
    hits: int = 1000


@dataclass
class _Answers:
    """What was answered for each picture, to see that it is the same again."""

    first: dict[int, bytes]
    compared: int = 0
    unequal: int = 0

    def take(self, serial: int, body: bytes) -> None:
        digest = hashlib.sha256(tensor_bytes(body)).digest()
        if serial in self.first:
            self.compared += 1
            self.unequal += digest != self.first[serial]
        else:
            self.first[serial] = digest

    def take_turn(self, turn: Turn, body: bytes) -> None:
        self.take(turn.items[0].serial, body)


def run(options: Options) -> Report:
    checks: list[Check] = []
    tables: list[Table] = []
    latencies: dict[str, list[tuple[Cell, float]]] = {}
    spent: dict[str, list[tuple[Cell, float]]] = {}
    figures: dict[str, Any] = {}
    for tower in options.towers:
        with world(model_path(tower), device=options.device) as served:
            sweep = [_sweep(served, percent, tower, options) for percent in options.percents]
            apart = _apart(served, tower, options)
            forwards = _joined(served)
        ratio = apart["miss_cpu_ms"] / apart["hit_cpu_ms"]
        unequal = apart["unequal"] + sum(row["unequal"] for row in sweep)
        compared = apart["compared"] + sum(row["compared"] for row in sweep)
        least = _LEAST_RATIO.get(tower)
        checks += [
            Check(name=f"{tower}: server CPU, miss over hit", measured=ratio, target=least, at_least=True),
            Check(name=f"{tower}: hit, p50", measured=apart["hit_p50_ms"], target=_HIT_MS, unit="ms"),
            Check(name=f"{tower}: answers unlike the first, of {compared}", measured=unequal, target=0),
            Check(
                name=f"{tower}: times that one new item was worked out, wanted {_JOINED} times at once",
                measured=forwards,
                target=1,
            ),
        ]
        tables.append(_table(tower, sweep))
        latencies[tower] = [(row["percent"], row["p50_ms"]) for row in sweep]
        spent[tower] = [(row["percent"], row["cpu_ms"]) for row in sweep]
        figures[tower] = {**apart, "sweep": sweep}
    return Report(
        checks=checks,
        tables=tables,
        plots=[
            Plot(kind="lines", title=title, x_label="reuse %", y_label="ms", series=series, log_y=True)
            for title, series in (("Server CPU per request", spent), ("Latency, p50", latencies))
        ],
        figures=figures,
    )


def _sweep(served: World, percent: int, tower: str, options: Options) -> dict[str, Any]:
    """A load of which `percent` of the items come again, some of them while the first is still at work."""
    answers = _Answers({})
    plan = LoadPlan(
        # Pictures of each percentage of their own, so that none is in the cache already.
        pools=[make_pictures([(224, 224)], 16, seed=1000 + percent)],
        reuse=percent / 100,
        clients=options.clients,
        num_requests=options.requests if tower == "tiny" else options.slow_requests,
        on_reply=answers.take_turn,
        seed=percent,
    )
    joined = served.metric("items_joined")
    with served.spending() as spent:
        tally = asyncio.run(run_load(served.url, plan))
    if tally.errors():
        raise RuntimeError(f"the server refused work: {tally.errors()}")
    good = tally.good()
    return {
        "percent": percent,
        "requests": len(good),
        "per_s": len(good) / tally.wall_s,
        "cpu_ms": 1e3 * sum(spent.values()) / len(good),
        "p50_ms": 1e3 * percentile(sorted(s.latency for s in good), 50),
        "cached_share": sum(s.cached for s in good) / len(good),
        "joined": served.metric("items_joined") - joined,
        "compared": answers.compared,
        "unequal": answers.unequal,
    }


def _apart(served: World, tower: str, options: Options) -> dict[str, Any]:
    """One client: so many new items, then the same again and again. CPU milliseconds are the whole server's, each."""
    num_new = 100 if tower == "tiny" else options.slow_requests // 2
    pictures = [unlike(data, index) for index, data in enumerate(make_pictures([(224, 224)], num_new, seed=77))]
    answers = _Answers({})
    hits_s = []
    with Connection(served.url) as connection:
        with served.spending() as misses:
            for index, picture in enumerate(pictures):
                answers.take(index, connection.encode(picture).body)
        with served.spending() as hits:
            for number in range(options.hits):
                reply = connection.encode(pictures[number % num_new])
                if not reply.cached:
                    raise RuntimeError("an item that was just encoded did not come out of the cache")
                answers.take(number % num_new, reply.body)
                hits_s.append(reply.seconds)
    return {
        "miss_cpu_ms": 1e3 * sum(misses.values()) / num_new,
        "hit_cpu_ms": 1e3 * sum(hits.values()) / options.hits,
        "hit_p50_ms": 1e3 * percentile(sorted(hits_s), 50),
        "compared": answers.compared,
        "unequal": answers.unequal,
    }


def _joined(served: World) -> float:
    """How often a replica worked one new picture out that was wanted so many times at once. All answers are alike."""
    answers = _Answers({})
    served.settle()
    before = served.metric("scheduler_cache_misses_total")
    plan = LoadPlan(
        pools=[make_pictures([(224, 224)], 1, seed=99)],
        reuse=1.0,
        clients=_JOINED,
        num_requests=_JOINED,
        on_reply=answers.take_turn,
    )
    asyncio.run(run_load(served.url, plan))
    served.settle()
    if answers.unequal:
        raise RuntimeError("equal items at the same time had unequal answers")
    return served.metric("scheduler_cache_misses_total") - before


def _table(tower: str, sweep: Sequence[dict[str, Any]]) -> Table:
    keys = ("percent", "per_s", "cpu_ms", "p50_ms", "cached_share", "joined", "compared", "unequal")
    columns = ["reuse %", "requests/s", "server CPU ms each", "p50 ms", "cached share", "joined", "compared", "unequal"]
    rows: list[Sequence[Cell]] = [[row[key] for key in keys] for row in sweep]
    return Table(tower, columns, rows)


SCENARIO = Scenario(
    name="reuse",
    about="Items that come again, 0 to 95 %: server CPU of misses over hits, a hit's latency, equality bit for bit.",
    full=Options(),
    quick=Options(towers=("tiny",), requests=60, hits=100),
    run=run,
)
