"""What a pause costs a program on this machine that does the same again after it: its caches are others' meanwhile."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

_OBJECTS = 6000
_TIMES = 150


def cold_over_warm(pause_s: float) -> tuple[float, float]:
    """CPU time of (a walk over 6,000 objects, as many sums) after such a pause over the same in a loop, medians."""
    objects = [bytearray(64) for _ in range(4 * _OBJECTS)]
    random.Random(0).shuffle(objects)

    def walk() -> int:
        return sum(data[0] for data in objects[:_OBJECTS])

    def compute() -> int:
        return sum(number * number for number in range(_OBJECTS))

    return _ratio(walk, pause_s), _ratio(compute, pause_s)


def _ratio(work: Callable[[], int], pause_s: float) -> float:
    return _median_s(work, pause_s) / _median_s(work, 0.0)


def _median_s(work: Callable[[], int], pause_s: float) -> float:
    taken = []
    for _ in range(_TIMES):
        if pause_s:
            time.sleep(pause_s)
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)
