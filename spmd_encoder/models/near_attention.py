"""ModernBERT's layers: attention over packed items, of most layers within a window of near rows, and how it is cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from spmd_encoder.models.attention import attend, rotate_in_float32_, runs, segment_lengths
from spmd_encoder.models.linear import by_rows
from spmd_encoder.models.sharding import Split, TowerPlan


class NearAttention(nn.Module):
    """Takes the place of transformers' own after it was cut, and needs no mask as large as a prompt's square."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = attention.Wqkv
        self.closing = attention.Wo
        self.head_dim = int(attention.head_dim)
        # transformers adds one, for flash attention's bounds.
        self._reach = None if attention.sliding_window is None else int(attention.sliding_window) - 1

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cu_seqlens: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """`[1, rows, width]` to the same; the second is where transformers' has weights of attention. `cu_seqlens`
        `[items + 1]` int32 are the items' ends after a 0, `position_embeddings` `[1, rows, head]` each."""
        qkv = by_rows(self._rotated, hidden_states[0], *(angles[0] for angles in position_embeddings))
        scale = self.head_dim**-0.5
        if self._reach is None:
            out = attend(qkv, cu_seqlens, scale)
        else:
            out = attend_near(qkv, cu_seqlens, scale, self._reach)
        return self.closing(out.flatten(1))[None], None

    def _rotated(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[rows, 3, heads, head]`, queries and keys rotated by their positions."""
        qkv: Tensor = self.qkv(hidden).view(len(hidden), 3, -1, self.head_dim)
        rotate_in_float32_(qkv, cos, sin)
        return qkv


def attend_near(qkv: Tensor, cu_seqlens: Tensor, scale: float, reach: int) -> Tensor:
    """As `attend`, to rows that are at most `reach` away: blocks of queries, each with the keys around it."""
    parts = []
    for run in runs(qkv, segment_lengths(cu_seqlens)):
        query, key, value = run.permute(2, 0, 3, 1, 4)
        blocks = []
        for start in range(0, run.shape[1], block := 2 * max(reach, 1)):
            stop = min(start + block, run.shape[1])
            low, high = max(start - reach, 0), min(stop + reach, run.shape[1])
            rows = torch.arange(start, stop, device=qkv.device)
            near = (rows[:, None] - torch.arange(low, high, device=qkv.device)).abs() <= reach
            around = (key[..., low:high, :], value[..., low:high, :])
            blocks.append(
                F.scaled_dot_product_attention(query[..., start:stop, :], *around, attn_mask=near, scale=scale)
            )
        parts.append(torch.cat(blocks, dim=-2).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over two items of unequal length."""
    rows, first = hidden.shape[0], hidden.shape[0] // 3
    angle = torch.linspace(0, 6, rows, device=hidden.device)[None, :, None].repeat(1, 1, int(attention.head_dim))  # type: ignore[arg-type]
    place = torch.arange(rows, device=hidden.device) >= first
    out: Tensor = attention(
        hidden[None],
        attention_mask=(place[:, None] == place)[None, None],
        position_embeddings=(angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype)),
        cu_seqlens=torch.tensor([0, first, rows], dtype=torch.int32),
    )[0]
    return out[0]


def modernbert_plan(layers: str, text: Any) -> TowerPlan:
    """The plan of the ModuleList `layers` of a ModernBERT with the configuration `text`."""
    attention = Split(
        path="attn",
        columns=("Wqkv",),
        parts=3,
        row="Wo",
        heads=int(text.num_attention_heads),
        run=_run_attention,
        faster=NearAttention,
    )
    mlp = Split(path="mlp", columns=("Wi",), parts=2, row="Wo")
    return TowerPlan(blocks=layers, num_blocks=text.num_hidden_layers, in_block=(attention, mlp))
