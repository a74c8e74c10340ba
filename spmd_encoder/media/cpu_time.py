"""How long a process was given a processor: tells one that is slow from one that is kept waiting."""

from __future__ import annotations

import time

_SCHEDULED = 2


def cpu_seconds(pid: int) -> float | None:
    """Of all its threads, since it began; None where the system does not tell, or the process has gone.

    By the clock that Linux has for each process, as clock_getcpuclockid(3) names it: it is asked for every item, and a
    file of /proc would take a tenth of the loop's time.
    """
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        return None
