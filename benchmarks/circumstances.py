"""Where and when something was measured, and whether the machine was quiet meanwhile."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Only a change of these changes what is measured; records are kept beside the benchmarks.
_MEASURED = ("spmd_encoder", "benchmarks", "pyproject.toml", ":!benchmarks/results", ":!benchmarks/*.md")
_ROOT = Path(__file__).parents[1]
_QUIET_SHARE = 0.05


def circumstances(module: str) -> dict[str, Any]:
    """Date, command, commit, hardware, Python."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": measured_commit(),
        "hardware": _hardware(),
        "python": platform.python_version(),
    }


def measured_commit() -> str:
    """The newest commit that changed the server or the benchmarks; `-dirty` where files differ from it."""
    commit = _git("log", "-1", "--format=%h", "--", *_MEASURED)
    return commit + ("-dirty" if _git("status", "--porcelain", "--", *_MEASURED) else "")


@dataclass(frozen=True)
class MachineWatch:
    """A look at the machine before a measurement; `until_now` tells what happened since.

    Others' share of the cores is all busy time less that of this process and of its children that have ended, so have
    them ended before. A virtual machine's stolen time counts as others'.
    """

    load: float
    busy_s: float
    own_s: float
    clock_s: float

    @classmethod
    def start(cls) -> MachineWatch:
        return cls(os.getloadavg()[0], _busy_s(), _own_s(), os.times().elapsed)

    def until_now(self) -> dict[str, Any]:
        now = self.start()
        elapsed_s = max(1e-9, now.clock_s - self.clock_s)
        others = ((now.busy_s - self.busy_s) - (now.own_s - self.own_s)) / elapsed_s / (os.cpu_count() or 1)
        noise = noise_of(others)
        return {
            "load_average_1_min": {"before": round(self.load, 2), "after": round(now.load, 2)},
            "others_share_of_cores": round(max(0.0, others), 3),
            "quiet": not noise,
            "noise": noise,
            "elapsed_s": round(elapsed_s, 1),
        }


def noise_of(others_share: float) -> list[str]:
    """Why the machine was not quiet; empty where it was. (The load average before says what the minute before was like,
    in which another scenario may have run.)"""
    return [f"other processes had {others_share:.0%} of the cores"] if others_share > _QUIET_SHARE else []


def _busy_s() -> float:
    """Seconds that the machine's cores were at work or stolen."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = dict(zip(names, map(int, Path("/proc/stat").read_text().split()[1:9]), strict=True))
    return sum(ticks[name] for name in ("user", "nice", "system", "steal")) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:4])


def _hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return f"{os.cpu_count()} cores, {model}"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip()
