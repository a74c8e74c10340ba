"""How figures are worked out of what was counted and timed: pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence


def batch_aligned_rate(answers: Iterable[tuple[float, float]]) -> float:
    """Items per second of a replica that was never idle, from each item's (time of its answer, seconds of its forward).

    A batch's answers come together, so a count over any stretch of time is wrong by up to a batch, which matters where
    a batch takes seconds. This counts from the end of one batch to the end of another: answers that follow each other
    faster than half a forward are of one batch. Raises ValueError where there are fewer than two batches.
    """
    ordered = sorted(answers)
    ends = [
        index
        for index, (at, _) in enumerate(ordered)
        if index + 1 == len(ordered) or ordered[index + 1][0] - at > ordered[index + 1][1] / 2
    ]
    if len(ends) < 2:
        raise ValueError(f"{len(ordered)} answers of {len(ends)} batches are too few for a rate")
    first, last = ends[0], ends[-1]
    return (last - first) / (ordered[last][0] - ordered[first][0])


def greedy_makespan(seconds: Sequence[float], machines: int) -> float:
    """When all is done if each item in turn goes to the machine that is free first."""
    free_at = [0.0] * machines
    for each in seconds:
        heapq.heapreplace(free_at, free_at[0] + each)
    return max(free_at)


def mean_batch(batches: Mapping[int, int]) -> float:
    """Items per forward, from forwards by their number of items."""
    forwards = sum(batches.values())
    return sum(size * count for size, count in batches.items()) / forwards if forwards else 0.0


def cpu_at_sizes(batches: Mapping[int, int], cpu_s_per_item: Mapping[int, float]) -> float:
    """CPU seconds that the same forwards take elsewhere, from CPU seconds per item at each batch size."""
    return sum(size * count * cpu_s_per_item[size] for size, count in batches.items())
