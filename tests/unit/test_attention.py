"""The Qwen towers' faster parts: exactly transformers' numbers, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionPatchEmbed, apply_rotary_pos_emb_vision

from spmd_encoder.models.attention import attend, rotate_, runs, segment_lengths
from spmd_encoder.models.linear import BLOCK, by_rows, linear_block
from spmd_encoder.models.qwen_vl import PatchEmbedding


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(deadline=None)
def test_segments_attend_to_themselves_alone(lengths: list[int]) -> None:
    qkv = draw(sum(lengths), 3, 2, 8)
    got = attend(qkv, ends(lengths), 0.3)
    for segment, out in zip(torch.split(qkv, lengths), torch.split(got, lengths), strict=True):
        query, key, value = segment.permute(1, 2, 0, 3)
        want = (query @ key.transpose(1, 2) * 0.3).softmax(-1) @ value
        torch.testing.assert_close(out, want.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_neighbours_of_equal_length_are_one_run() -> None:
    rows = draw(20, 3, 2, 8)
    assert [run.shape[:2] for run in runs(rows, [4, 4, 4, 2, 2, 4])] == [(3, 4), (2, 2), (1, 4)]
    assert torch.equal(torch.cat([run.flatten(0, 1) for run in runs(rows, [4, 4, 4, 2, 2, 4])]), rows)


def test_rotation_has_the_bits_of_transformers() -> None:
    x, cos, sin = draw(40, 2, 4, 20), draw(40, 20, seed=1), draw(40, 20, seed=2)
    want = torch.stack(apply_rotary_pos_emb_vision(x[:, 0], x[:, 1], cos, sin), dim=1)
    rotate_(x, cos[:, None, None], sin[:, None, None])
    assert torch.equal(x, want)


@pytest.mark.parametrize("rows", [1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_rows_come_back_in_order(rows: int) -> None:
    seen: list[int] = []

    def double(x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        return 2 * x + y

    x, y = draw(rows, 3), draw(rows, 3, seed=1)
    assert torch.equal(by_rows(double, x, y), 2 * x + y)
    assert max(seen) <= 1.5 * BLOCK
    assert max(seen) - min(seen) <= 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [64, 2561, 3420])
def test_a_wide_layer_in_slices_is_a_linear(width: int, bias: bool) -> None:
    x, weight = draw(30, 48), draw(width, 48, seed=1)
    added = draw(width, seed=2) if bias else None
    torch.testing.assert_close(linear_block(x, weight, added), F.linear(x, weight, added), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("patches", [4, BLOCK, 2 * BLOCK + 4])
def test_patches_side_by_side_are_embedded_as_one_by_one(patches: int) -> None:
    embedding = Qwen2_5_VisionPatchEmbed(patch_size=14, embed_dim=32)
    pixels = draw(patches, 3 * 2 * 14 * 14)
    with torch.inference_mode():
        got, want = PatchEmbedding(embedding)(pixels), embedding(pixels)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_lengths_are_read_from_a_tensor_once() -> None:
    ends = torch.tensor([0, 3, 6, 10], dtype=torch.int32)
    lengths = segment_lengths(ends)
    assert lengths == [3, 3, 4]
    assert segment_lengths(ends) is lengths
    assert segment_lengths(torch.tensor([0, 10])) == [10]
