"""What a scenario found: figures, checks against targets, and what its table and picture are made of. Plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Cell = str | float | int


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number beside its target, if it has one. A target is an upper bound, or with `at_least` a lower one."""

    name: str
    measured: float
    target: float | None = None
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "measured": rounded(self.measured), "met": self.met}


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """`series` has points by name. Bars take the first point's x as labels; lines take numbers. `target` is a line."""

    kind: str
    """`bars` or `lines`."""
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[Cell, float]]]
    target: float | None = None
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    checks: Sequence[Check]
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is worth keeping; JSON."""

    def to_dict(self) -> dict[str, Any]:
        tables = [dataclasses.asdict(table) for table in self.tables]
        for table in tables:
            table["rows"] = [[rounded(cell) for cell in row] for row in table["rows"]]
        plots = [dataclasses.asdict(plot) for plot in self.plots]
        checks = [check.to_dict() for check in self.checks]
        return {"checks": checks, "tables": tables, "plots": plots, "figures": dict(self.figures)}


def rounded(value: Any) -> Any:
    """Four significant digits, of a float; whole numbers keep all of theirs."""
    if not isinstance(value, float):
        return value
    return round(value) if abs(value) >= 1e4 else float(f"{value:.4g}")
