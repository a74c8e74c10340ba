"""The replica's own numbers, carried to the dispatcher in heartbeats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spmd_encoder.api.types import StageTimes
from spmd_encoder.scheduler.cache import ResultCache
from spmd_encoder.wire.messages import SchedulerStats


@dataclass
class StatsKeeper:
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

    def snapshot(self, *, queue_items: int, running_items: int, cache: ResultCache) -> SchedulerStats:
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
            batch_size_counts=tuple(sorted(self.sizes.items())),
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            cache_evictions=cache.evictions,
            cache_entries=len(cache),
            cache_bytes=cache.bytes,
        )
