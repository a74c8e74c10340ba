"""What one measurement sends, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.load_generator.mix import Turn


class Arrivals(Enum):
    """How the requests of an open loop follow each other at their mean rate."""

    POISSON = "poisson"
    FIXED = "fixed"


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """One measurement. It ends after `duration_s` or `num_requests`, whichever comes first.

    `pools` has, per kind of picture, the files that are sent in turn; every one is made unlike all others (a comment
    in a JPEG), so that a server's cache knows only what `reuse` repeats. `shares` are the kinds' weights. `reuse` is
    the share of items that repeat one of the last `window` new ones, `chaos` the share of requests that are bad or
    whose client hangs up.

    Without `rate` the loop is closed: each of `clients` sends when its last reply is here. With `rate`, in requests per
    second, requests are due at times that wait for nobody; `clients`, if given, then bounds how many are under way, and
    what is late because of it counts as latency. Plans that differ in nothing send the same files; with another `seed`
    all files are others.
    """

    pools: Sequence[Sequence[bytes]]
    shares: Sequence[float] = ()
    reuse: float = 0.0
    window: int = 256
    chaos: float = 0.0
    items_per_request: int = 1
    output: str | None = None
    clients: int | None = None
    rate: float | None = None
    arrivals: Arrivals = Arrivals.POISSON
    duration_s: float = 600.0
    num_requests: int | None = None
    timeout_s: float = 300.0
    give_up_s: float = 5.0
    """It ends after so long a time in which every connection failed: there is no server any more."""
    seed: int = 0
    on_reply: Callable[[Turn, bytes], None] | None = None
    """Is given every good reply's body, as safetensors."""

    def __post_init__(self) -> None:
        if not self.pools or not all(self.pools):
            raise ValueError("a load needs at least one picture of each kind")
        if self.shares and len(self.shares) != len(self.pools):
            raise ValueError(f"{len(self.shares)} shares for {len(self.pools)} kinds of pictures")
        if not (0 <= self.reuse <= 1 and 0 <= self.chaos <= 1):
            raise ValueError("reuse and chaos are shares from 0 to 1")
        if self.rate is None and self.clients is None:
            raise ValueError("a load needs a number of clients, a rate, or both")
        if (self.rate is not None and not 0 < self.rate < math.inf) or (self.clients is not None and self.clients < 1):
            raise ValueError("rate must be a number above 0, and clients at least 1")
        if (
            self.items_per_request < 1
            or self.window < 1
            or not all(seconds > 0 for seconds in (self.duration_s, self.timeout_s, self.give_up_s))
        ):
            raise ValueError("items per request, window, duration and timeouts must be above 0")
