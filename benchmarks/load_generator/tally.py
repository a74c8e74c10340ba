"""What came of a load, and its numbers."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

OK = "OK"
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are in seconds since the start: when it was due, sent, and had its whole reply.

    `code` is `OK`, the server's error code, or the name of what broke here. `chaos` names the bad thing that it was.
    `answered`: it had a reply, whatever it said.
    The rest is from the reply's headers: items out of a cache, who answered, milliseconds by stage.
    """

    due: float
    sent: float
    ended: float
    code: str = OK
    chaos: str = ""
    expected: bool = True
    items: int = 1
    answered: bool = True
    cached: int = 0
    replica: str = ""
    stages_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def latency(self) -> float:
        """Seconds since it was due: the wait for a free client is part of what a user would have waited."""
        return self.ended - self.due

    @property
    def service(self) -> float:
        """Seconds since it was sent."""
        return self.ended - self.sent


@dataclass
class Tally:
    """All requests of one load, with the generator's own CPU seconds."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0
    own_cpu_s: float = 0.0
    interrupted: bool = False
    """It was cut off: what was under way then is not among the samples."""
    server_ended: bool = False
    """It ended early, since there was nobody to send to any more."""

    def good(self) -> list[Sample]:
        """Those that were meant well and answered well."""
        return [sample for sample in self.samples if sample.code == OK and not sample.chaos]

    def errors(self) -> dict[str, int]:
        """By code, of requests that were meant well."""
        return dict(collections.Counter(s.code for s in self.samples if s.code != OK and not s.chaos))

    def chaos(self) -> dict[str, dict[str, int]]:
        """By bad thing and what came of it; an outcome that the server should not have given begins with `!`."""
        found: dict[str, collections.Counter[str]] = {}
        for s in self.samples:
            if s.chaos:
                found.setdefault(s.chaos, collections.Counter())[s.code if s.expected else f"!{s.code}"] += 1
        return {name: dict(counter) for name, counter in found.items()}

    def report(self) -> dict[str, Any]:
        good = self.good()
        num_items = sum(sample.items for sample in good)
        answered = sum(sample.answered for sample in self.samples)
        return {
            "interrupted": self.interrupted,
            "server_ended": self.server_ended,
            "requests": len(self.samples),
            "answered": answered,
            "ok": len(good),
            "errors": self.errors(),
            "chaos": self.chaos(),
            "wall_s": round(self.wall_s, 3),
            "answered_per_s": self._per_s(answered),
            "ok_per_s": self._per_s(len(good)),
            "ok_items_per_s": self._per_s(num_items),
            "cached_share": round(sum(s.cached for s in good) / num_items, 4) if num_items else 0.0,
            "latency_ms": latency_ms(s.latency for s in good),
            "service_ms": latency_ms(s.service for s in good),
            "sent_late_ms": latency_ms(s.sent - s.due for s in good),
            "generator_cpu_s": round(self.own_cpu_s, 3),
        }

    def _per_s(self, number: int) -> float:
        return round(number / self.wall_s, 2) if self.wall_s else 0.0


def latency_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Percentiles, mean and maximum in milliseconds; empty where there are none."""
    values = sorted(seconds)
    if not values:
        return {}
    found = {f"p{p:g}": percentile(values, p) for p in PERCENTILES}
    found |= {"max": values[-1], "mean": sum(values) / len(values)}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of `values` that at least `percent` of them do not exceed (nearest rank)."""
    return float(np.percentile(values, percent, method="inverted_cdf"))
