"""What is known of one request and its reply while it is answered, and what the reply's headers say of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_encoder.api.types import Embedding, ItemOutcome, StageTimes
from spmd_encoder.frontends.base import replicas_of


@dataclass
class Exchange:
    """`times` are each stage's longest over the request's items, in seconds."""

    started: float = field(default_factory=time.perf_counter)
    request_id: str | None = None
    replicas: list[int] = field(default_factory=list)
    times: StageTimes | None = None
    cached: int = 0

    def note(self, outcomes: Sequence[ItemOutcome]) -> None:
        """Take from an answer what its headers say."""
        self.replicas = replicas_of(outcomes)
        self.cached = sum(outcome.cached for outcome in outcomes if isinstance(outcome, Embedding))
        times = [outcome.times for outcome in outcomes if isinstance(outcome, Embedding)]
        if times:
            self.times = StageTimes(
                queue_s=max(t.queue_s for t in times),
                preprocess_s=max(t.preprocess_s for t in times),
                forward_s=max(t.forward_s for t in times),
            )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Raw header pairs: who answered, which request, how long."""
        replicas = ",".join(map(str, self.replicas)) or "none"
        out = [(b"x-spmd-replica", replicas.encode())]
        if self.request_id is not None:
            out.append((b"x-request-id", self.request_id.encode()))
        out.append((b"x-total-time-ms", _ms(time.perf_counter() - self.started)))
        if self.times is not None:
            out.append((b"x-spmd-cached", str(self.cached).encode()))
            out.append((b"x-queue-time-ms", _ms(self.times.queue_s)))
            out.append((b"x-preprocess-time-ms", _ms(self.times.preprocess_s)))
            out.append((b"x-forward-time-ms", _ms(self.times.forward_s)))
        return out


def _ms(seconds: float) -> bytes:
    return f"{seconds * 1000:.2f}".encode()
