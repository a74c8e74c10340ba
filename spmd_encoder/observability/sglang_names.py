"""What is measured here under the names and labels of SGLang's encoder, for dashboards that know those.

Made from our own numbers at each scrape, so that nothing is counted twice. What SGLang measures and this server does
not has no line. `modality` is a label of what is measured by request; stages, batches and caches are not measured by
modality here, and have no such label.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_OWN, _THEIRS = "spmd_encoder_", "sglang:encoder_"
_BATCH_BUCKETS = (*range(1, 17), 32, 64, 128)

Labels = Mapping[str, str]
Relabel = Callable[[Labels], dict[str, str] | None]
"""Their labels of ours; None leaves a sample out."""


def _same(*names: str) -> Relabel:
    return lambda ours: {name: ours[name] for name in names}


def _stage(stage: str) -> Relabel:
    return lambda ours: {} if ours["stage"] == stage else None


_RENAMED: Mapping[str, tuple[tuple[str, Relabel], ...]] = MappingProxyType(
    {
        "sglang_requests_received": (("requests_received", _same("modality")),),
        "sglang_requests": (("requests", _same("modality", "status")),),
        "sglang_request_seconds": (("request_e2e_latency_seconds", _same("modality")),),
        "sglang_items_per_request": (("mm_items_per_request", _same("modality")),),
        "transfer_seconds": (
            ("transfer_seconds", lambda ours: _same("backend")(ours) if ours["outcome"] == "ok" else None),
        ),
        "stage_seconds": (
            ("queue_wait_seconds", _stage("queue")),
            ("preprocess_seconds", _stage("preprocess")),
            ("model_forward_seconds", _stage("forward")),
        ),
        "scheduler_cache_hits": (("cache_hit_files", _same("dp_rank")),),
        "scheduler_cache_evictions": (("cache_evictions", _same("dp_rank")),),
        "cache_entries": (("cache_entries", _same("dp_rank")),),
    }
)


def sglang_text(own: str, model_name: str) -> bytes:
    """Prometheus text of the numbers of `own`, our Prometheus text, under SGLang's names."""
    families = {family.name.removeprefix(_OWN): family for family in text_string_to_metric_families(own)}
    registry = CollectorRegistry()
    registry.register(_Made([*_renamed(families, model_name), *_computed(families, model_name)]))
    return generate_latest(registry)


class _Made(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _renamed(families: Mapping[str, Metric], model_name: str) -> Iterable[Metric]:
    for name, targets in _RENAMED.items():
        if (family := families.get(name)) is None:
            continue
        for theirs, relabel in targets:
            made = Metric(_THEIRS + theirs, family.documentation, family.type)
            for sample in family.samples:
                if (labels := relabel(sample.labels)) is not None:
                    bucket = {"le": sample.labels["le"]} if "le" in sample.labels else {}
                    # Numbers of the whole server have no rank; an empty label is none.
                    named = {"model_name": model_name, "dp_rank": "", **labels, **bucket}
                    made.samples.append(Sample(made.name + sample.name.removeprefix(family.name), named, sample.value))
            yield made


def _computed(families: Mapping[str, Metric], model_name: str) -> Iterable[Metric]:
    """Sums of ours, for each replica."""

    def by_rank(*names: str) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for name in names:
            for sample in families[name].samples if name in families else ():
                sums[sample.labels["dp_rank"]] += sample.value
        return sums

    def family(name: str, text: str, values: Mapping[str, float], *, total: bool = False) -> Metric:
        made = Metric(_THEIRS + name, text, "counter" if total else "gauge")
        for rank, value in sorted(values.items()):
            labels = {"model_name": model_name, "dp_rank": rank}
            made.samples.append(Sample(made.name + ("_total" if total else ""), labels, value))
        return made

    pending = by_rank("scheduler_queue_items", "scheduler_running_items")
    yield family("dp_pending_requests", "Items at work or waiting on a replica", pending)
    files = by_rank("scheduler_cache_hits", "scheduler_cache_misses")
    yield family("cache_total_files", "Items looked up in the cache", files, total=True)
    megabytes = {rank: size / 2**20 for rank, size in by_rank("cache_bytes").items()}
    yield family("cache_size_mb", "MiB of results held", megabytes)
    yield _batch_sizes(families.get("scheduler_batches_of_size"), model_name)


def _batch_sizes(batches: Metric | None, model_name: str) -> Metric:
    labels = ["model_name", "dp_rank"]
    made = HistogramMetricFamily(_THEIRS + "mm_items_per_batch", "Items in a forward", labels=labels)
    counts: dict[str, dict[int, float]] = defaultdict(dict)
    for sample in batches.samples if batches is not None else ():
        counts[sample.labels["dp_rank"]][int(sample.labels["items"])] = sample.value
    for rank, sizes in sorted(counts.items()):
        below = [(str(float(le)), sum(n for size, n in sizes.items() if size <= le)) for le in _BATCH_BUCKETS]
        buckets = [*below, ("+Inf", sum(sizes.values()))]
        made.add_metric([model_name, rank], buckets, sum_value=sum(size * n for size, n in sizes.items()))
    return made
