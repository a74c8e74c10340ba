"""When the requests of an open loop are due: pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from benchmarks.load_generator.plan import Arrivals


def due_times(rate: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Seconds since the start, without end: every `1 / rate`, or with exponential gaps of that mean (Poisson)."""
    if arrivals is Arrivals.FIXED:
        return (index / rate for index in itertools.count())
    rng = random.Random(seed)
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())
