"""One item's embedding as the engine gives it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spmd_encoder.api.types import Detail, OutputKind


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """One item's embedding in host memory: `data` are the little-endian C-order bytes of `shape` in `dtype`."""

    kind: OutputKind
    shape: tuple[int, ...]
    dtype: str
    num_tokens: int
    grid: tuple[int, int, int] | None
    data: memoryview
    details: dict[str, Detail] = field(default_factory=dict)
