"""How long a process was given a processor: tells one that is slow from one that is kept waiting."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_seconds(pid: int) -> float | None:
    """Of all its threads, since it began; None where the system does not tell, or the process has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # proc(5): the name, in parentheses, may hold anything; 12 fields later there are utime and stime.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
