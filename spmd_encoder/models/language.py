"""The layers of a language model that is part of an encoder: how they are cut, and attention over packed items."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_encoder.models.attention import SegmentAttention, rotate_
from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.sharding import Split, TowerPlan, bounds


class LanguageAttention(SegmentAttention):
    """Takes the place of transformers' own after its queries were cut: over packed items, without a mask.

    Several heads of queries share one of keys and values. There are few of those, often fewer than ranks: every rank
    has them all, and picks those of its own queries.
    """

    key_heads: Tensor

    def __init__(self, attention: Any) -> None:
        super().__init__(attention, closing="o_proj")
        group, shared = self.closing.group, int(attention.num_key_value_groups)
        heads = attention.q_proj.weight.shape[0] // self.head_dim
        every = attention.k_proj.weight.shape[0] // self.head_dim * shared
        low, _ = bounds(every, dist.get_world_size(group), dist.get_rank(group))
        self.key_heads = nn.Buffer(torch.arange(low, low + heads) // shared, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        is_causal: bool = True,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """`[1, rows, width]` to the same; the second is where transformers' has weights of attention. `cu_seqlens`
        `[items + 1]` int32 are the items' ends after a 0, `position_embeddings` `[1, rows, head]` each."""
        cos, sin = position_embeddings
        return self.attend(hidden_states, cu_seqlens, (cos[0], sin[0]), is_causal=is_causal), None

    def _rotated(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        query, key, value = (column(hidden).view(len(hidden), -1, self.head_dim) for column in self.columns)
        cos, sin = (angles[:, None] for angles in positions)
        rotate_(query, cos, sin)
        rotate_(key, cos, sin)
        return torch.stack([query, key[:, self.key_heads], value[:, self.key_heads]], dim=1)


def _run_attention(attention: nn.Module, hidden: Tensor, *, is_causal: bool) -> Tensor:
    """The attention of one block over two items of unequal length."""
    rows, first = hidden.shape[0], hidden.shape[0] // 3
    ends = torch.tensor([0, first, rows], dtype=torch.int32, device=hidden.device)
    angle = torch.linspace(0, 6, rows, device=hidden.device)[None, :, None].repeat(1, 1, int(attention.head_dim))  # type: ignore[arg-type]
    place = torch.arange(rows, device=hidden.device)
    seen = (place[:, None] >= first) == (place >= first)
    out: Tensor = attention(
        hidden[None],
        attention_mask=(seen & (place[:, None] >= place) if is_causal else seen)[None, None],
        position_embeddings=(angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype)),
        cu_seqlens=ends,
        is_causal=is_causal,
    )[0]
    return out[0]


def language_plan(layers: str, text: Any, *, is_causal: bool) -> TowerPlan:
    """The plan of the ModuleList `layers` of a language model with the configuration `text`."""
    attention = Split(
        path="self_attn",
        columns=("q_proj",),
        row="o_proj",
        heads=int(text.num_attention_heads),
        run=partial(_run_attention, is_causal=is_causal),
        faster=LanguageAttention,
    )
    mlp = feed_forward("gate_proj", "up_proj", row="down_proj", activation="act_fn")
    return TowerPlan(blocks=layers, num_blocks=text.num_hidden_layers, in_block=(attention, mlp))
