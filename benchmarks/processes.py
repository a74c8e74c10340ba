"""What processes cost: CPU seconds and memory, from the kernel and of named processes only, whatever else runs beside
them. Linux only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch/distributed/run.py")


@dataclass(frozen=True)
class Server:
    """The launcher's whole tree; one of which neither `/info` nor its title tells is `other`."""

    roles: Mapping[int, str]
    root: psutil.Process

    @classmethod
    def of(cls, processes: Sequence[Mapping[str, Any]]) -> Server:
        """From `/info`'s `processes`. Raises ValueError where they are not on this machine."""
        roles = {int(entry["pid"]): str(entry["role"]) for entry in processes}
        keepers = [pid for pid, role in roles.items() if role == "keeper"]
        if not keepers:
            raise ValueError("the server names no processes of its own")
        try:
            root = psutil.Process(keepers[0])
        except psutil.NoSuchProcess:
            raise ValueError(f"the server's process {keepers[0]} is not on this machine") from None
        parent = root.parent()
        if parent is not None and any(name in " ".join(parent.cmdline()) for name in _LAUNCHERS):
            root = parent
        return cls(roles, root)

    @property
    def is_alive(self) -> bool:
        """Whether its launcher is."""
        try:
            return bool(self.root.is_running() and self.root.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def members(self) -> list[tuple[str, psutil.Process]]:
        """(role, process) of all that live now; none once the launcher has ended."""
        try:
            tree = [self.root, *self.root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return [(self._role(process), process) for process in tree]

    def cpu_s(self) -> dict[int, tuple[str, float]]:
        """(role, CPU seconds so far) by pid."""
        found = {}
        for role, process in self.members():
            try:
                found[process.pid] = (role, process_cpu_s(process.pid))
            except OSError:  # it has ended
                continue
        return found

    def total_pss(self) -> int:
        """Bytes of all but the launcher."""
        total = 0
        for role, process in self.members():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += 0 if role == "launcher" else memory_of(process.pid)["Pss"]
        return total

    def pss_mib(self, kind: str = "Pss") -> dict[str, float]:
        """Proportional set size by role: shared pages are split, so that the sum is what the machine holds.

        `PssAnon` leaves out the pages of files, whose split depends on who else maps them: growth shows in the rest.
        """
        total: dict[str, float] = {}
        for role, process in self.members():
            try:
                total[role] = total.get(role, 0.0) + memory_of(process.pid)[kind] / 2**20
            except (FileNotFoundError, ProcessLookupError):
                continue
        return {role: round(mib, 1) for role, mib in total.items()}

    def _role(self, process: psutil.Process) -> str:
        """As `/info` says, which hears of young processes a moment late; then as its own title says."""
        if process.pid in self.roles:
            return self.roles[process.pid]
        if process.pid == self.root.pid:
            return "launcher"
        with contextlib.suppress(psutil.Error, IndexError):
            own, role, *_ = process.cmdline()[0].split()
            return role if own == "spmd_encoder" else "other"
        return "other"


def cpu_spent_s(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """CPU seconds between two readings, by role; a process that ended in between is not in it."""
    spent: dict[str, float] = {}
    for pid, (role, seconds) in after.items():
        spent[role] = spent.get(role, 0.0) + seconds - before.get(pid, (role, 0.0))[1]
    return {role: round(seconds, 3) for role, seconds in spent.items()}


def process_cpu_s(pid: int) -> float:
    """CPU seconds so far of a process, all its threads' in nanoseconds' resolution. Raises OSError where it is gone.

    /proc/PID/stat has ticks of 10 ms, too coarse for a request. This is the clock that clock_getcpuclockid(3) names.
    """
    return time.clock_gettime((~pid << 3) | 2)


def memory_of(pid: int) -> dict[str, int]:
    """Bytes: `Rss`, `Pss` (shared pages are split among those that map them), `PssAnon` (of it, what is of no file) and
    `Uss` (what it alone has).

    Raises FileNotFoundError or ProcessLookupError where it is gone.
    """
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0]) * 1024
    return {
        "Rss": found["Rss"],
        "Pss": found["Pss"],
        "PssAnon": found["Pss_Anon"] + found["Pss_Shmem"],
        "Uss": found["Private_Clean"] + found["Private_Dirty"],
    }


def file_pages(smaps: str) -> dict[str, int]:
    """Resident bytes of the pages of each mapped file, by its path, from a process's /proc/PID/smaps.

    What a process has written to a private mapping is its own, and not the file's.
    """
    found: dict[str, int] = {}
    path = ""
    for line in smaps.splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # a mapping's first line: range, rights, offset, device, inode, path
            path = " ".join(rest[4:]) if len(rest) > 4 else ""
        elif path.startswith("/") and name in ("Rss:", "Anonymous:"):
            sign = 1 if name == "Rss:" else -1
            found[path] = found.get(path, 0) + sign * int(rest[0]) * 1024
    return found
