"""Attention within windows of a picture or spectrogram, with a bias for each two places in a window (Swin)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from spmd_encoder.models.sharding import RowParallelLinear, bounds


class WindowAttention(nn.Module):
    """Takes the place of transformers' own attention of Swin after it was cut: of the biases, too, it has those of
    this rank's heads."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        own = attention.get_submodule("self")
        self.columns = nn.ModuleList([own.query, own.key, own.value])
        self.closing: RowParallelLinear = attention.output.dense
        self._head_dim = int(own.attention_head_size)
        group = self.closing.group
        table = own.relative_position_bias_table
        low, _ = bounds(table.shape[1], dist.get_world_size(group), dist.get_rank(group))
        heads = own.query.weight.shape[0] // self._head_dim
        self.table = nn.Parameter(table.detach()[:, low : low + heads], requires_grad=False)
        self.relative_position_index = nn.Buffer(own.relative_position_index, persistent=False)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor]:
        """`[items * windows, places, width]` to the same. `attention_mask` `[windows, places, places]` is added."""
        query, key, value = (
            column(hidden).unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for column in self.columns
        )
        bias = self.table[self.relative_position_index].permute(2, 0, 1)
        if attention_mask is None:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        else:
            windows = len(attention_mask)
            query, key, value = (part.unflatten(0, (-1, windows)) for part in (query, key, value))
            mask = bias + attention_mask[:, None]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).flatten(0, 1)
        return (self.closing(mixed.transpose(1, 2).flatten(2)),)


def run_windows(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over one window, whose places repeat the few that are given."""
    own: Any = attention if isinstance(attention, WindowAttention) else attention.get_submodule("self")
    places = len(own.relative_position_index)
    out: Tensor = attention(hidden.repeat(places // len(hidden) + 1, 1)[None, :places])[0]
    return out[0]
