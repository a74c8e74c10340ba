"""What is measured of SGLang's calls."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from spmd_encoder.api.types import Modality
from spmd_encoder.observability.samples import Samples

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 180)
_ITEMS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 256)


class DialectMetrics:
    """A call of `/encode` that waits for an equal one's end counts like any other."""

    def __init__(self, registry: CollectorRegistry, backend: str) -> None:
        name, by_kind = "spmd_encoder_sglang_", ["modality"]
        self._backend = backend
        self._samples = Samples(registry)
        self._received = Counter(name + "requests_received", "Calls of /encode", by_kind, registry=registry)
        self._requests = Counter(
            name + "requests", "Calls of /encode by their end", [*by_kind, "status"], registry=registry
        )
        self._seconds = Histogram(
            name + "request_seconds",
            "Time from a call of /encode to its reply",
            by_kind,
            buckets=_SECONDS,
            registry=registry,
        )
        self._parts = Gauge(name + "parts", "Parts that anything is remembered of", registry=registry)
        self._items = Histogram(
            name + "items_per_request", "Items of a call of /encode", by_kind, buckets=_ITEMS, registry=registry
        )
        self._transfers = Histogram(
            "spmd_encoder_transfer_seconds",
            "Time to push one part of embeddings to one receiver",
            ["backend", "outcome"],
            buckets=_SECONDS,
            registry=registry,
        )

    def count_parts(self, num_parts: Callable[[], int]) -> None:
        """Show `num_parts()` from now on."""
        self._parts.set_function(num_parts)

    def received(self, modality: Modality, num_items: int | None) -> None:
        """`num_items` is None where the items cannot be read."""
        self._samples.add(self._count_received, modality, num_items)

    def answered(self, modality: Modality, seconds: float, good: bool) -> None:
        self._samples.add(self._count_answered, modality, seconds, good)

    def pushed(self, seconds: float, good: bool) -> None:
        self._samples.add(self._count_pushed, seconds, good)

    def _count_received(self, modality: Modality, num_items: int | None) -> None:
        self._received.labels(modality.value).inc()
        if num_items is not None:
            self._items.labels(modality.value).observe(num_items)

    def _count_answered(self, modality: Modality, seconds: float, good: bool) -> None:
        self._requests.labels(modality.value, "success" if good else "error").inc()
        self._seconds.labels(modality.value).observe(seconds)

    def _count_pushed(self, seconds: float, good: bool) -> None:
        self._transfers.labels(self._backend, "ok" if good else "failed").observe(seconds)
