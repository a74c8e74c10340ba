"""What is measured of gRPC itself."""

from __future__ import annotations

from grpc import StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class GrpcMetrics:
    """Labels are methods that exist, as in `spmd_encoder.v1.Encoder/Encode`: a client cannot make new time series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "spmd_encoder_grpc_"
        self._calls = Counter(name + "calls", "gRPC calls answered", ("method", "code"), registry=registry)
        self._seconds = Histogram(
            name + "call_duration_seconds",
            "Time from a call's metadata to the end of its reply",
            ("method",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.in_flight = Gauge(name + "calls_in_flight", "gRPC calls being answered", registry=registry)

    def observe(self, method: str, code: StatusCode, seconds: float) -> None:
        self._calls.labels(method, code.name).inc()
        self._seconds.labels(method).observe(seconds)
