"""Counters that only grow, whatever epochs do."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from spmd_encoder.api.types import ReadyState, StageTimes
from spmd_encoder.dispatcher.metrics import DispatcherMetrics
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import SchedulerStats

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(metrics: DispatcherMetrics) -> Samples:
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: DispatcherMetrics, name: str, **labels: str) -> float:
    return read(metrics)["spmd_encoder_" + name, tuple(sorted(labels.items()))]


def stats(n: int, **more: object) -> SchedulerStats:
    return SchedulerStats(batches=n, completed=2 * n, forward_s=0.5 * n, batch_size_counts=((2, n),), **more)


def test_heartbeats_add_up_over_epochs() -> None:
    metrics = DispatcherMetrics(range(2))
    for epoch, n in [(0, 3), (0, 5), (0, 5), (1, 1), (1, 4), (2, 6)]:
        before = read(metrics)
        metrics.replica_stats(1, epoch, stats(n))
        after = read(metrics)
        gone_back = [key for key in before if key[0].endswith("_total") and after[key] < before[key]]
        assert not gone_back
    assert value(metrics, "scheduler_batches_total", dp_rank="1") == 5 + 4 + 6
    assert value(metrics, "scheduler_completed_total", dp_rank="1") == 2 * 15
    assert value(metrics, "scheduler_forward_seconds_total", dp_rank="1") == 7.5
    assert value(metrics, "scheduler_batches_of_size_total", dp_rank="1", items="2") == 15
    assert value(metrics, "replica_epoch", dp_rank="1") == 2


def test_replicas_do_not_mix() -> None:
    metrics = DispatcherMetrics(range(2))
    metrics.replica_stats(0, 0, stats(3))
    metrics.replica_stats(1, 0, stats(4))
    metrics.replica_stats(0, 0, stats(5))
    assert value(metrics, "scheduler_batches_total", dp_rank="0") == 5
    assert value(metrics, "scheduler_batches_total", dp_rank="1") == 4


def test_what_the_readme_names_is_there() -> None:
    metrics = DispatcherMetrics(range(1))
    metrics.replica_stats(0, 0, stats(1))
    metrics.refused(ErrorCode.QUEUE_FULL)
    named = set(re.findall(r"`(spmd_encoder_[a-z_]+)`", (Path(__file__).parents[2] / "README.md").read_text()))
    assert len(named) >= 9
    assert named <= {name for name, _ in read(metrics)}


def test_gauges_follow() -> None:
    metrics = DispatcherMetrics(range(1))
    metrics.replica_stats(0, 0, stats(1, queue_items=7, running_items=2))
    assert value(metrics, "scheduler_queue_items", dp_rank="0") == 7
    metrics.replica_stats(0, 0, stats(1, queue_items=0, running_items=1))
    assert value(metrics, "scheduler_queue_items", dp_rank="0") == 0
    assert value(metrics, "scheduler_running_items", dp_rank="0") == 1
    state = ReadyState(ready=True, started=True, draining=False, replicas_ready=1, replicas=3)
    metrics.gauges(state, jobs=4, tokens=5, inflight_bytes=99, retried=2, joined=3)
    names = (
        "replicas_ready",
        "replicas",
        "items_in_hand",
        "tokens_in_hand",
        "inflight_bytes",
        "items_retried",
        "items_joined",
    )
    assert [value(metrics, name) for name in names] == [1, 3, 4, 5, 99, 2, 3]


def test_idle_seconds_have_their_reasons_and_threads_their_cpu_time() -> None:
    metrics = DispatcherMetrics(range(1))
    metrics.replica_stats(
        0, 0, stats(1, idle_empty_s=2.0, idle_preparation_s=1.0, idle_delivery_s=0.5, loop_cpu_s=0.25)
    )
    metrics.replica_stats(
        0, 0, stats(2, idle_empty_s=3.0, idle_preparation_s=1.0, idle_delivery_s=0.5, loop_cpu_s=0.75)
    )
    metrics.replica_stats(0, 1, stats(1, idle_empty_s=4.0, compute_cpu_s=8.0))
    reasons = ("empty", "preparation", "delivery")
    told = [value(metrics, "tower_idle_seconds_total", dp_rank="0", reason=reason) for reason in reasons]
    assert told == [7.0, 1.0, 0.5]
    assert value(metrics, "scheduler_loop_cpu_seconds_total", dp_rank="0") == 0.75
    assert value(metrics, "scheduler_compute_cpu_seconds_total", dp_rank="0") == 8.0


def test_items_and_refusals_are_counted_by_kind() -> None:
    metrics = DispatcherMetrics(range(1))
    metrics.item_completed(StageTimes(queue_s=0.5, preprocess_s=0.25, forward_s=2.0))
    metrics.item_failed(ErrorCode.MEDIA_CORRUPT)
    metrics.item_failed(ErrorCode.MEDIA_CORRUPT)
    metrics.refused(ErrorCode.QUEUE_FULL)
    metrics.reformed(0)
    assert value(metrics, "items_total", outcome="ok") == 1
    assert value(metrics, "items_total", outcome="media_corrupt") == 2
    assert value(metrics, "requests_refused_total", code="QUEUE_FULL") == 1
    assert value(metrics, "replica_reforms_total", dp_rank="0") == 1
    sums = [value(metrics, "stage_seconds_sum", stage=stage) for stage in ("queue", "preprocess", "forward")]
    assert sums == [0.5, 0.25, 2.0]


def test_two_dispatchers_do_not_share_counters() -> None:
    first, second = DispatcherMetrics(range(1)), DispatcherMetrics(range(1))
    first.reformed(0)
    assert value(second, "replica_reforms_total", dp_rank="0") == 0
