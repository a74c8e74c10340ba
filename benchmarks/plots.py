"""Draws a record's plots with matplotlib (the extra `[bench]`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

plt.switch_backend("agg")


def draw(plots: list[Mapping[str, Any]], out: Path) -> None:
    """All plots side by side in one PNG."""
    figure: Figure
    figure, axes = plt.subplots(1, len(plots), figsize=(6 * len(plots), 4), squeeze=False)
    for axis, plot in zip(axes[0], plots, strict=True):
        (_bars if plot["kind"] == "bars" else _lines)(axis, plot)
        axis.set(title=plot["title"], xlabel=plot["x_label"], ylabel=plot["y_label"])
        if plot["log_y"]:
            axis.set_yscale("log")
        if plot["target"] is not None:
            axis.axhline(plot["target"], color="black", linestyle="--", linewidth=1, label="target")
        if len(plot["series"]) > 1 or plot["target"] is not None:
            axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _bars(axis: Axes, plot: Mapping[str, Any]) -> None:
    labels = list(dict.fromkeys(str(x) for points in plot["series"].values() for x, _ in points))
    width = 0.8 / len(plot["series"])
    for index, (name, points) in enumerate(plot["series"].items()):
        left = [labels.index(str(x)) - 0.4 + (index + 0.5) * width for x, _ in points]
        axis.bar(left, [y for _, y in points], width, label=name)
    axis.set_xticks(range(len(labels)), labels, rotation=20 if len(labels) > 3 else 0, fontsize="small")


def _lines(axis: Axes, plot: Mapping[str, Any]) -> None:
    for name, points in plot["series"].items():
        axis.plot([x for x, _ in points], [y for _, y in points], marker="." if len(points) < 50 else "", label=name)
