"""What two servers' samples say beside each other: medians of ratios, checks and tables. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import Cell, Check, Report, Table

CLOSE = 1e-4
"""The most that rows may differ by, as a share of their largest value."""


@dataclass(frozen=True)
class Sample:
    """One server under one load. `cpu_ms` is of all its processes, per request."""

    per_s: float
    p50_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Pair:
    """Two samples, taken one after the other."""

    ours: Sample
    sglang: Sample


@dataclass
class Setting:
    """What one load at one number of replicas gave. `target` is how many times SGLang's requests per second there shall
    be, `raw_cpu_ms` what our tower takes for a picture without a server, from its file on, by batch size. `pairs` is by
    number of clients, the rest by server."""

    load: str
    dp: int
    target: float
    raw_cpu_ms: dict[int, float] = field(default_factory=dict)
    rows_differ: float = 0.0
    resized_rows_differ: float = 0.0
    pairs: dict[int, list[Pair]] = field(default_factory=dict)
    pss: dict[str, int] = field(default_factory=dict)
    end_s: dict[str, float] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.load}, DP {self.dp}"


@dataclass(frozen=True)
class Compared:
    """Both servers' medians of a figure, and the ratios of its pairs, ours over SGLang's."""

    ours: float
    sglang: float
    ratios: Sequence[float]

    @classmethod
    def of(cls, pairs: Sequence[Pair], figure: Callable[[Sample], float]) -> Compared:
        ours, sglang = [figure(pair.ours) for pair in pairs], [figure(pair.sglang) for pair in pairs]
        ratios = [mine / theirs for mine, theirs in zip(ours, sglang, strict=True)]
        return cls(statistics.median(ours), statistics.median(sglang), ratios)

    @property
    def ratio(self) -> float:
        """The median of the ratios, which need not be that of the medians."""
        return statistics.median(self.ratios)

    def cells(self) -> list[Cell]:
        return [self.ours, self.sglang, self.ratio]


def report(settings: Sequence[Setting]) -> Report:
    checks: list[Check] = []
    loads: list[Sequence[Cell]] = []
    rests: list[Sequence[Cell]] = []
    for setting in settings:
        checks.append(Check(name=f"{setting.name}: rows differ by", measured=setting.rows_differ, target=CLOSE))
        checks.append(Check(name=f"{setting.name}: of resized pictures", measured=setting.resized_rows_differ))
        for clients, pairs in setting.pairs.items():
            more, row = _load(setting, clients, pairs)
            checks += more
            loads.append(row)
        more, row = _rest(setting)
        checks += more
        rests.append(row)
    columns = ["load", "DP", "clients", "requests/s", "SGLang's", "times", "from", "to"]
    columns += ["p50 ms", "SGLang's", "times", "CPU ms per request", "SGLang's", "times"]
    ends = ["load", "DP", "rows differ by", "resized", "PSS MiB", "SGLang's", "times", "s to end", "SGLang's"]
    ends += ["left after SIGTERM", "SGLang's", "CPU ms without server"]
    return Report(
        checks=checks,
        tables=[Table("Under load", columns, loads), Table("Rows, memory after load, end", ends, rests)],
        figures={setting.name: _figures(setting) for setting in settings},
    )


def _load(setting: Setting, clients: int, pairs: Sequence[Pair]) -> tuple[list[Check], list[Cell]]:
    name = f"{setting.name}, {clients} client{'s' if clients > 1 else ''}"
    rate = Compared.of(pairs, lambda sample: sample.per_s)
    latency = Compared.of(pairs, lambda sample: sample.p50_ms)
    cpu = Compared.of(pairs, lambda sample: sample.cpu_ms)
    checks = [
        Check(name=f"{name}: requests/s", measured=rate.ratio, target=setting.target, at_least=True),
        Check(name=f"{name}: p50", measured=latency.ratio, target=1.0),
        Check(name=f"{name}: CPU per request", measured=cpu.ratio, target=1.0),
    ]
    spread = [min(rate.ratios), max(rate.ratios)]
    return checks, [setting.load, setting.dp, clients, *rate.cells(), *spread, *latency.cells(), *cpu.cells()]


def _rest(setting: Setting) -> tuple[list[Check], list[Cell]]:
    both = ("ours", "sglang")
    pss = setting.pss["ours"] / setting.pss["sglang"]
    left = [len(setting.left[who]) for who in both]
    checks = [
        Check(name=f"{setting.name}: PSS after load", measured=pss, target=1.0),
        Check(name=f"{setting.name}: our processes that outlive SIGTERM", measured=left[0], target=0),
    ]
    mib = [round(setting.pss[who] / 2**20) for who in both]
    seconds = [setting.end_s[who] for who in both]
    raw = ", ".join(f"{cpu_ms:.3g} in batches of {size}" for size, cpu_ms in setting.raw_cpu_ms.items())
    differ = [setting.rows_differ, setting.resized_rows_differ]
    return checks, [setting.load, setting.dp, *differ, *mib, pss, *seconds, *left, raw]


def _figures(setting: Setting) -> dict[str, Any]:
    pairs = {clients: [dataclasses.asdict(pair) for pair in found] for clients, found in setting.pairs.items()}
    return {"raw_cpu_ms": setting.raw_cpu_ms, "pairs_by_clients": pairs, "pss": setting.pss, "left": setting.left}
