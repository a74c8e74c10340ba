"""The attention of the Qwen-VL towers over packed pictures: no mask, and rotation while the values are in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from spmd_encoder.models.linear import by_rows
from spmd_encoder.models.sharding import ColumnParallelLinear, RowParallelLinear


class PackedAttention(nn.Module):
    """Takes the place of transformers' vision attention after it was cut, with the same arguments and result."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv: ColumnParallelLinear = attention.qkv
        self.proj: RowParallelLinear = attention.proj
        self.head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """`[rows, width]` to the same. `cu_seqlens` `[segments + 1]` int32 are the segments' ends after a 0,
        `position_embeddings` cosines and sines, `[rows, head]` each."""
        qkv = by_rows(self._rotated, hidden_states, *position_embeddings)
        out = attend(qkv, cu_seqlens, self._scale)
        return self.proj(out.flatten(1))  # type: ignore[no-any-return]

    def _rotated(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[rows, 3, heads, head]`, queries and keys rotated by their positions."""
        qkv = self.qkv.block(hidden).view(len(hidden), 3, -1, self.head_dim)
        rotate_in_float32_(qkv, cos, sin)
        return qkv


class SegmentAttention(nn.Module):
    """As `PackedAttention`, for attentions with three layers for queries, keys and values, and without a batch's mask.

    The layer after them is `closing`.
    """

    def __init__(
        self, attention: Any, closing: str, columns: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    ) -> None:
        super().__init__()
        self.columns = nn.ModuleList([getattr(attention, name) for name in columns])
        self.closing: RowParallelLinear = getattr(attention, closing)
        self.head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)

    def attend(
        self,
        hidden: Tensor,
        cu_seqlens: Tensor,
        positions: tuple[Tensor, Tensor] | None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """`[1, rows, width]` to the same. `cu_seqlens` `[segments + 1]` int32 are the segments' ends after a 0,
        `positions` cosines and sines, `[rows, head]` each, or None where positions are no part of attention."""
        qkv = by_rows(self._rotated, hidden[0], *(positions or ()))
        out = attend(qkv, cu_seqlens, self._scale, is_causal=is_causal)
        return self.closing(out.flatten(1))[None]  # type: ignore[no-any-return]

    def _rotated(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        """`[rows, 3, heads, head]`, queries and keys rotated by their positions, if any."""
        parts = [column(hidden).view(len(hidden), -1, self.head_dim) for column in self.columns]
        qkv = torch.stack(parts, dim=1)
        if positions:
            cos, sin = positions
            rotate_(qkv[:, :2], cos[:, None, None], sin[:, None, None])
        return qkv


def rotate_in_float32_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate queries and keys of `[rows, 3, heads, head]` by their positions, as transformers does in Qwen-VL: in
    float32 whatever the dtype; for float32 the tensor itself is rotated."""
    both = qkv[:, :2].float()
    rotate_(both, cos[:, None, None].float(), sin[:, None, None].float())
    if both.dtype is not qkv.dtype:
        qkv[:, :2] = both


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`x * cos + rotate_half(x) * sin` in place, where `rotate_half` of (a, b) is (-b, a)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    # No addcmul: its fused steps round otherwise than transformers' do.
    from_a, from_b = a * sin[..., half:], b * sin[..., :half]
    a.mul_(cos[..., :half]).sub_(from_b)
    b.mul_(cos[..., half:]).add_(from_a)


def attend(qkv: Tensor, cu_seqlens: Tensor, scale: float, *, is_causal: bool = False) -> Tensor:
    """Attention within each segment, to earlier rows alone where `is_causal`. `qkv` `[rows, 3, heads, head]`; gives
    `[rows, heads, head]`.

    Neighbours of equal length go in one call, without a mask, which torch has a flash attention for.
    """
    parts = []
    for run in runs(qkv, segment_lengths(cu_seqlens)):
        query, key, value = run.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=is_causal)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def segment_lengths(cu_seqlens: Tensor) -> list[int]:
    """Of `[segments + 1]` ends after a 0. They are kept with the tensor, which is the same in many layers: each reading
    would have the processor wait for the device."""
    held: list[int] | None = getattr(cu_seqlens, "segment_lengths", None)
    if held is None:
        held = cu_seqlens.segment_lengths = cu_seqlens.diff().tolist()  # type: ignore[attr-defined]
    return held


def runs(qkv: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    """Views `[segments, length, ...]` of `qkv`: neighbours of equal length, as most windows are, as one."""
    start = 0
    for length, equal in groupby(lengths):
        stop = start + length * sum(1 for _ in equal)
        yield qkv[start:stop].view(-1, length, *qkv.shape[1:])
        start = stop
