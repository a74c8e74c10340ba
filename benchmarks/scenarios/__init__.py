"""All scenarios, in the order in which `all` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from benchmarks.scenario import Scenario
from benchmarks.scenarios import (
    added_latency,
    burst,
    fused,
    large_bodies,
    memory,
    mixed_sizes,
    overhead,
    reuse,
    saturation,
    scaling,
    slow_download,
)

_MODULES = (
    *(saturation, added_latency, overhead, fused, mixed_sizes, reuse),
    *(slow_download, burst, large_bodies, scaling, memory),
)
_ALL: tuple[Scenario[Any], ...] = (*(module.SCENARIO for module in _MODULES), saturation.LONG)
SCENARIOS: Mapping[str, Scenario[Any]] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
