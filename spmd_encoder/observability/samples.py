"""Measurements that are counted a little later, many at once: labelled metrics are some hundred calls per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

P = ParamSpec("P")
_MOST = 64
"""So many take well under a millisecond to count."""


class Samples(Collector):
    """To be made before the metrics of `registry` that it brings up to date: a scrape goes in this order."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting: list[Callable[[], None]] = []
        registry.register(self)

    def add(self, count: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it, a little later."""
        self._waiting.append(lambda: count(*args, **kwargs))
        if len(self._waiting) >= _MOST:
            self._settle()

    def collect(self) -> Iterable[Metric]:
        """Asked for at each scrape; has no metrics of its own."""
        self._settle()
        return ()

    def describe(self) -> Iterable[Metric]:
        return ()

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for count in waiting:
            count()
