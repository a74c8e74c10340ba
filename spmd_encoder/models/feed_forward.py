"""The feed-forward part of a block, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from spmd_encoder.models.linear import by_rows
from spmd_encoder.models.sharding import ColumnParallelLinear, RowParallelLinear, Split


class FeedForward(nn.Module):
    """`row(activation(first(x)))`, or `row(activation(first(x)) * second(x))` where `columns` are two.

    The wide values in between exist for one block of rows at a time, so that they stay in a CPU's cache.
    """

    def __init__(
        self, columns: Sequence[ColumnParallelLinear], activation: Callable[[Tensor], Tensor], row: RowParallelLinear
    ) -> None:
        super().__init__()
        self.columns = nn.ModuleList(columns)
        self._layers = tuple(columns)
        self._activation = activation
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return self.row.reduce(by_rows(self._block, x.flatten(0, -2)).view(x.shape))

    def _block(self, x: Tensor) -> Tensor:
        first, *second = (layer.block(x) for layer in self._layers)
        wide = self._activation(first)
        for factor in second:
            wide = wide.mul_(factor)
        return self.row.block(wide)


def feed_forward(*columns: str, row: str, activation: str) -> Split:
    """The plan for a block's `mlp` whose layers and activation have these names."""

    def faster(mlp: Any) -> FeedForward:
        layers = [mlp.get_submodule(name) for name in columns]
        return FeedForward(layers, getattr(mlp, activation), mlp.get_submodule(row))

    return Split(path="mlp", columns=columns, row=row, faster=faster)
