"""Memory and descriptors of each process of a world over a run, and how fast they grow. Linux only: it reads /proc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

_FIELDS = {"Rss": "rss", "Pss": "pss", "Private_Clean": "uss", "Private_Dirty": "uss"}
MEASURES = ("rss", "pss", "uss")
_LEAST_POINTS = 4


@dataclass(frozen=True)
class Sample:
    """One process after `requests` requests: bytes, and open descriptors."""

    requests: int
    rss: int
    pss: int
    uss: int
    fds: int


@dataclass
class Samples:
    """`processes` gives those that live now, by a name that stays the same. `done` counts requests so far."""

    processes: Callable[[], dict[str, psutil.Process]]
    done: Callable[[], int]
    by_process: dict[str, list[Sample]] = field(default_factory=dict)
    pids: dict[str, set[int]] = field(default_factory=dict)

    def take(self) -> None:
        """Blocks for some milliseconds per process."""
        requests = self.done()
        for name, process in self.processes().items():
            try:
                sample = Sample(requests, **read_memory(process.pid), fds=process.num_fds())
            except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                continue
            self.by_process.setdefault(name, []).append(sample)
            self.pids.setdefault(name, set()).add(process.pid)

    def report(self) -> dict[str, dict[str, float]]:
        """Per process, over the second half of the run: bytes per 1,000 requests of each measure, the descriptors'
        growth, and what it holds at the end. `pids` above 1 says that it was replaced."""
        return {
            name: {**growth(samples), "pids": len(self.pids[name])} for name, samples in sorted(self.by_process.items())
        }


def read_memory(pid: int) -> dict[str, int]:
    """Bytes: resident, proportional and unique set size."""
    found = dict.fromkeys(MEASURES, 0)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] += int(rest.split()[0]) * 1024
    return found


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """See `Samples.report`. NaN where there are too few samples for a slope."""
    half = [sample for sample in samples if sample.requests >= samples[-1].requests / 2]
    out: dict[str, float] = {}
    for measure in MEASURES:
        points = [(sample.requests, getattr(sample, measure)) for sample in half]
        out[f"{measure}_bytes_per_1000"] = slope(points) * 1000
        out[f"{measure}_mib_end"] = round(getattr(samples[-1], measure) / 2**20, 2)
    out["fds_growth"] = half[-1].fds - half[0].fds
    out["fds_end"] = half[-1].fds
    return out


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares. NaN for fewer than four points, or where all have one x."""
    if len(points) < _LEAST_POINTS or len({x for x, _ in points}) == 1:
        return float("nan")
    x, y = np.array(points, dtype=float).T
    centred = x - x.mean()
    return float((centred @ (y - y.mean())) / (centred @ centred))
