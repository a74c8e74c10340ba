"""What is known of one request and its reply while it is answered, and what the reply's headers say of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_encoder.api.types import Embedding, ItemOutcome, StageTimes
from spmd_encoder.frontends.base import replicas_of


@dataclass
class Exchange:
    """`times` are each stage's longest over the request's items, in seconds. `fetch_s`: until all URLs were fetched;
    `delivery_s`: until all embeddings were where they were to go; None where there was none to."""

    started: float = field(default_factory=time.perf_counter)
    request_id: str | None = None
    replicas: list[int] = field(default_factory=list)
    times: StageTimes | None = None
    cached: int = 0
    fetch_s: float | None = None
    delivery_s: float | None = None

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
                transfer_s=max(t.transfer_s for t in times),
            )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Raw header pairs: who answered, which request, how long."""
        replicas = ",".join(map(str, self.replicas)) or "none"
        out = [(b"x-spmd-replica", replicas.encode())]
        if self.request_id is not None:
            out.append((b"x-request-id", self.request_id.encode()))
        if self.times is not None:
            out.append((b"x-spmd-cached", str(self.cached).encode()))
        out.append((b"server-timing", self._server_timing().encode()))
        return out

    def _server_timing(self) -> str:
        """Milliseconds by stage, as the W3C's Server Timing has them."""
        stages: dict[str, float | None] = {"total": time.perf_counter() - self.started, "fetch": self.fetch_s}
        if (times := self.times) is not None:
            stages |= {"queue": times.queue_s, "preprocess": times.preprocess_s}
            stages |= {"forward": times.forward_s, "transfer": times.transfer_s}
        stages["delivery"] = self.delivery_s
        return ", ".join(f"{name};dur={seconds * 1000:.2f}" for name, seconds in stages.items() if seconds is not None)
