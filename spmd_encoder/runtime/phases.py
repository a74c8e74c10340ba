"""How long each phase of a worker's start took, one after another without gaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Phases:
    """The first one began at `began`, by `clock`; a node's processes share the monotonic clock."""

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = began
        self._seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        """The phase `name` ends now."""
        now = self._clock()
        self._seconds[name] = round(now - self._last, 3)
        self._last = now

    @property
    def seconds(self) -> Mapping[str, float]:
        """By name, in order."""
        return dict(self._seconds)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._seconds.items())
