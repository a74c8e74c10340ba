"""What a server's processes cost, by role: CPU seconds and memory from /proc. Linux only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.startup import pss_bytes

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch/distributed/run.py")


@dataclass(frozen=True)
class Server:
    """The launcher's whole tree; a process that `/info` does not know is `launcher` at the top, else `other`."""

    roles: Mapping[int, str]
    root: psutil.Process

    @classmethod
    def of(cls, processes: Sequence[Mapping[str, Any]]) -> Server:
        """From `/info`'s `processes`, on this machine."""
        roles = {int(entry["pid"]): str(entry["role"]) for entry in processes}
        keepers = [pid for pid, role in roles.items() if role == "keeper"]
        root = psutil.Process(keepers[0])
        parent = root.parent()
        if parent is not None and any(name in " ".join(parent.cmdline()) for name in _LAUNCHERS):
            root = parent
        return cls(roles, root)

    def members(self) -> list[tuple[str, psutil.Process]]:
        """(role, process) of all that live now."""
        tree = [self.root, *self.root.children(recursive=True)]
        return [(self._role(process.pid), process) for process in tree]

    def cpu_s(self) -> dict[int, tuple[str, float]]:
        """User and system seconds so far, by pid; ended children are with their parent."""
        found = {}
        for role, process in self.members():
            try:
                found[process.pid] = (role, sum(process.cpu_times()[:2]))
            except psutil.NoSuchProcess:
                continue
        return found

    def cpu_outside_s(self) -> float:
        """User and system seconds so far of this process and its children, without the server if it is one."""
        server = {process.pid for _, process in self.members()}
        own = psutil.Process()
        ours = [own, *(child for child in own.children(recursive=True) if child.pid not in server)]
        return sum(sum(process.cpu_times()[:2]) for process in ours)

    def pss_mib(self) -> dict[str, float]:
        """Proportional set size by role: shared pages are split, so that the sum is what the machine holds."""
        total: dict[str, float] = {}
        for role, process in self.members():
            try:
                total[role] = total.get(role, 0.0) + pss_bytes(process.pid) / 2**20
            except (FileNotFoundError, ProcessLookupError):
                continue
        return {role: round(mib, 1) for role, mib in total.items()}

    def _role(self, pid: int) -> str:
        return self.roles.get(pid) or ("launcher" if pid == self.root.pid else "other")


def cpu_spent_s(before: Mapping[int, tuple[str, float]], after: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """CPU seconds between two readings, by role; a process that ended in between is not in it."""
    spent: dict[str, float] = {}
    for pid, (role, seconds) in after.items():
        spent[role] = spent.get(role, 0.0) + seconds - before.get(pid, (role, 0.0))[1]
    return {role: round(seconds, 3) for role, seconds in spent.items()}
