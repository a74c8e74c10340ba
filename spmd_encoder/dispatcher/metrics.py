"""What the dispatcher measures and what replicas report in heartbeats, for Prometheus; one registry per dispatcher."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spmd_encoder.api.types import ReadyState, StageTimes
from spmd_encoder.errors import ErrorCode
from spmd_encoder.observability.samples import Samples
from spmd_encoder.wire.messages import SchedulerStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)
_COUNTED = (
    ("batches", "Forwards run"),
    ("batch_items", "Items in these forwards"),
    ("batch_tokens", "Encoder tokens (patches) in these forwards"),
    ("completed", "Items completed by the scheduler"),
    ("failed", "Items failed by the scheduler"),
    ("dropped", "Items dropped because their time was over"),
    ("queue_s", "Seconds that items waited"),
    ("preprocess_s", "Seconds of decoding and preprocessing"),
    ("forward_s", "Seconds of forwards"),
    ("loop_cpu_s", "CPU seconds of the leader's loop thread"),
    ("compute_cpu_s", "CPU seconds of the leader's compute thread, without those that torch starts"),
    ("cache_hits", "Items answered from the cache"),
    ("cache_misses", "Items that the cache did not hold"),
    ("cache_evictions", "Results that the cache dropped to make room"),
)
_IDLE = ("empty", "preparation", "delivery")


class DispatcherMetrics:
    def __init__(self, replicas: Iterable[int]) -> None:
        self._registry = CollectorRegistry()
        self._samples = Samples(self._registry)
        name = "spmd_encoder_"
        self._items = Counter(name + "items", "Items by outcome", ["outcome"], registry=self._registry)
        self._refused = Counter(name + "requests_refused", "Requests refused whole", ["code"], registry=self._registry)
        self._stages = Histogram(
            name + "stage_seconds", "Time per item and stage", ["stage"], buckets=_SECONDS, registry=self._registry
        )
        self._ready = Gauge(name + "replicas_ready", "Replicas that take work", registry=self._registry)
        self._replicas = Gauge(name + "replicas", "Replicas of the world", registry=self._registry)
        self._jobs = Gauge(name + "items_in_hand", "Items accepted and not answered", registry=self._registry)
        self._tokens = Gauge(
            name + "tokens_in_hand", "Encoder tokens that these items are priced at", registry=self._registry
        )
        self._bytes = Gauge(name + "inflight_bytes", "Media bytes held", registry=self._registry)
        self._retried = Gauge(name + "items_retried", "Items sent again after a loss", registry=self._registry)
        self._joined = Gauge(
            name + "items_joined", "Items answered by the work of an equal one in flight", registry=self._registry
        )
        self._epoch = Gauge(name + "replica_epoch", "Epoch of the replica", ["dp_rank"], registry=self._registry)
        self._reforms = Counter(
            name + "replica_reforms", "Times that the replica was formed anew", ["dp_rank"], registry=self._registry
        )
        self._queue = Gauge(name + "scheduler_queue_items", "Items waiting", ["dp_rank"], registry=self._registry)
        self._running = Gauge(name + "scheduler_running_items", "Items running", ["dp_rank"], registry=self._registry)
        self._cache_entries = Gauge(name + "cache_entries", "Results held", ["dp_rank"], registry=self._registry)
        self._cache_bytes = Gauge(name + "cache_bytes", "Bytes of results held", ["dp_rank"], registry=self._registry)
        self._sizes = Counter(
            name + "scheduler_batches_of_size",
            "Forwards by number of items",
            ["dp_rank", "items"],
            registry=self._registry,
        )
        self._idle = Counter(
            name + "tower_idle_seconds",
            "Seconds without a forward: nothing is here, nothing is prepared, a batch or its results are handed over",
            ["dp_rank", "reason"],
            registry=self._registry,
        )
        self._counted = {
            field: Counter(
                name + "scheduler_" + (field[:-1] + "seconds" if field.endswith("_s") else field),
                text,
                ["dp_rank"],
                registry=self._registry,
            )
            for field, text in _COUNTED
        }
        self._last: dict[int, tuple[int, SchedulerStats]] = {}
        self._ok = self._items.labels("ok")
        self._stage = {stage: self._stages.labels(stage) for stage in ("queue", "preprocess", "forward", "transfer")}
        for replica in replicas:
            self._reforms.labels(replica)

    def item_completed(self, times: StageTimes) -> None:
        self._samples.add(self._count_completed, times)

    def item_failed(self, code: ErrorCode) -> None:
        self._items.labels(code.value.lower()).inc()

    def refused(self, code: ErrorCode) -> None:
        self._refused.labels(code.value).inc()

    def reformed(self, replica: int) -> None:
        self._reforms.labels(replica).inc()

    def replica_stats(self, replica: int, epoch: int, stats: SchedulerStats) -> None:
        """Add what is new since the last heartbeat: a new epoch counts from zero, the exposed counters go on."""
        seen_epoch, before = self._last.get(replica, (epoch, SchedulerStats()))
        if seen_epoch != epoch:
            before = SchedulerStats()
        self._last[replica] = (epoch, stats)
        self._epoch.labels(replica).set(epoch)
        self._queue.labels(replica).set(stats.queue_items)
        self._running.labels(replica).set(stats.running_items)
        self._cache_entries.labels(replica).set(stats.cache_entries)
        self._cache_bytes.labels(replica).set(stats.cache_bytes)
        for field, counter in self._counted.items():
            counter.labels(replica).inc(max(0.0, getattr(stats, field) - getattr(before, field)))
        for reason in _IDLE:
            idle_s = getattr(stats, f"idle_{reason}_s") - getattr(before, f"idle_{reason}_s")
            self._idle.labels(replica, reason).inc(max(0.0, idle_s))
        old_sizes = dict(before.batch_size_counts)
        for size, count in stats.batch_size_counts:
            self._sizes.labels(replica, size).inc(max(0, count - old_sizes.get(size, 0)))

    def gauges(
        self, state: ReadyState, *, jobs: int, tokens: int, inflight_bytes: int, retried: int, joined: int
    ) -> None:
        self._ready.set(state.replicas_ready)
        self._replicas.set(state.replicas)
        self._jobs.set(jobs)
        self._tokens.set(tokens)
        self._bytes.set(inflight_bytes)
        self._retried.set(retried)
        self._joined.set(joined)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _count_completed(self, times: StageTimes) -> None:
        self._ok.inc()
        self._stage["queue"].observe(times.queue_s)
        self._stage["preprocess"].observe(times.preprocess_s)
        self._stage["forward"].observe(times.forward_s)
        self._stage["transfer"].observe(times.transfer_s)
