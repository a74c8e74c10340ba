"""What is measured of HTTP itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spmd_encoder.observability.samples import Samples

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Labels are route templates and known methods only: a client cannot make new time series."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Without a registry that others add to it has one of its own, so that two apps in one process do not mix."""
        self.registry = registry or CollectorRegistry()
        self._samples = Samples(self.registry)
        labels = ("route", "method")
        self._requests = Counter(
            "spmd_encoder_http_requests", "HTTP requests answered", (*labels, "code"), registry=self.registry
        )
        self._seconds = Histogram(
            "spmd_encoder_http_request_duration_seconds",
            "Time from a request's headers to the end of its reply",
            labels,
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "spmd_encoder_http_requests_in_flight", "HTTP requests being answered", registry=self.registry
        )

    def observe(self, route: str | None, method: str, code: int, seconds: float) -> None:
        """`route` is the route's template, or None where no route matched."""
        self._samples.add(self._count, route, method, code, seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _count(self, route: str | None, method: str, code: int, seconds: float) -> None:
        labels = (route or "unmatched", method if method in _METHODS else "other")
        self._requests.labels(*labels, str(code)).inc()
        self._seconds.labels(*labels).observe(seconds)
