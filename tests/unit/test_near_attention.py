"""Attention within segments, to earlier or to near rows alone, against plain attention with a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_encoder.models.attention import attend
from spmd_encoder.models.near_attention import attend_near

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def sample(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys and values; the segments' ends; each row's place; which rows are of one segment)."""
    rows = sum(lengths)
    qkv = torch.randn(rows, 3, 2, 8, generator=torch.Generator().manual_seed(rows))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return qkv, ends, torch.arange(rows), segment[:, None] == segment


def masked(qkv: Tensor, mask: Tensor) -> Tensor:
    query, key, value = qkv.permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3).transpose(0, 1)


@settings(deadline=None)
@given(lengths=LENGTHS, reach=st.integers(0, 50))
def test_near_rows_are_seen_and_no_others(lengths: list[int], reach: int) -> None:
    qkv, ends, place, same = sample(lengths)
    want = masked(qkv, same & ((place[:, None] - place).abs() <= reach))
    torch.testing.assert_close(attend_near(qkv, ends, 0.3, reach), want)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_earlier_rows_are_seen_and_no_others(lengths: list[int]) -> None:
    qkv, ends, place, same = sample(lengths)
    torch.testing.assert_close(attend(qkv, ends, 0.3, is_causal=True), masked(qkv, same & (place[:, None] >= place)))
