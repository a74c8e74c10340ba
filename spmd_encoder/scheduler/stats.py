"""The replica's own numbers, carried to the dispatcher in heartbeats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from spmd_encoder.api.types import StageTimes
from spmd_encoder.scheduler.cache import ResultCache
from spmd_encoder.wire.messages import SchedulerStats


class Idle(Enum):
    """Why the tower stands still: nothing is here; nothing is prepared; a batch, or what came of it, is handed over."""

    EMPTY = auto()
    PREPARATION = auto()
    DELIVERY = auto()


class TowerClock:
    """Seconds in which the tower computes nothing, by reason. A batch counts when it is over, less its forward."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._idle = dict.fromkeys(Idle, 0.0)
        self._reason = Idle.EMPTY
        self._since = clock()
        self._in_batch = False

    def waits(self, reason: Idle) -> None:
        """From now on, or still, for this reason."""
        self._close()
        self._reason = reason

    def batch_began(self) -> None:
        self._close()
        self._in_batch = True

    def batch_ended(self, forward_s: float) -> None:
        now = self._clock()
        self._idle[Idle.DELIVERY] += max(0.0, now - self._since - forward_s)
        self._since, self._in_batch = now, False

    def idle_s(self) -> dict[Idle, float]:
        """So far, with the time that runs now."""
        self._close()
        return dict(self._idle)

    def _close(self) -> None:
        if not self._in_batch:
            now = self._clock()
            self._idle[self._reason] += now - self._since
            self._since = now


@dataclass
class StatsKeeper:
    clock: Callable[[], float] = time.monotonic
    batches: int = 0
    batch_items: int = 0
    batch_tokens: int = 0
    completed: int = 0
    failed: int = 0
    dropped: int = 0
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    sizes: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tower = TowerClock(self.clock)

    def batch_done(self, *, items: int, tokens: int, forward_s: float) -> None:
        self.batches += 1
        self.batch_items += items
        self.batch_tokens += tokens
        self.forward_s += forward_s
        self.sizes[items] += 1

    def item_done(self, times: StageTimes) -> None:
        self.completed += 1
        self.queue_s += times.queue_s
        self.preprocess_s += times.preprocess_s

    def item_failed(self) -> None:
        self.failed += 1

    def item_dropped(self) -> None:
        self.dropped += 1

    def snapshot(
        self, *, queue_items: int, running_items: int, cache: ResultCache, compute_cpu_s: float
    ) -> SchedulerStats:
        """Called on the loop's thread, whose CPU time it tells."""
        idle = self.tower.idle_s()
        return SchedulerStats(
            queue_items=queue_items,
            running_items=running_items,
            batches=self.batches,
            batch_items=self.batch_items,
            batch_tokens=self.batch_tokens,
            completed=self.completed,
            failed=self.failed,
            dropped=self.dropped,
            queue_s=self.queue_s,
            preprocess_s=self.preprocess_s,
            forward_s=self.forward_s,
            idle_empty_s=idle[Idle.EMPTY],
            idle_preparation_s=idle[Idle.PREPARATION],
            idle_delivery_s=idle[Idle.DELIVERY],
            loop_cpu_s=time.thread_time(),
            compute_cpu_s=compute_cpu_s,
            batch_size_counts=tuple(sorted(self.sizes.items())),
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            cache_evictions=cache.evictions,
            cache_entries=len(cache),
            cache_bytes=cache.bytes,
        )
