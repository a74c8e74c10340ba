"""A Qwen tower without one of the parts that make it faster, for `benchmarks.tower --gains`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from spmd_encoder.models import linear
from spmd_encoder.models.base import FamilyAdapter
from spmd_encoder.models.qwen_vl import TOWER

Run = Callable[[Mapping[str, Tensor]], Any]


def without_patches(adapter: Any, theirs: Any) -> Run:
    """Each patch convolved as a picture of its own."""
    adapter._model.get_submodule(TOWER).patch_embed = theirs.patch_embed
    return adapter.forward  # type: ignore[no-any-return]


def without_attention(adapter: Any, theirs: Any) -> Run:
    """transformers' attention around our Linears."""
    for ours, block in zip(adapter._model.get_submodule(TOWER).blocks, theirs.blocks, strict=True):
        block.attn.qkv, block.attn.proj = ours.attn.qkv, ours.attn.proj
        ours.attn = block.attn
    return adapter.forward  # type: ignore[no-any-return]


def without_feed_forward(adapter: Any, theirs: Any) -> Run:
    """transformers' feed-forward part around our Linears."""
    for ours, block in zip(adapter._model.get_submodule(TOWER).blocks, theirs.blocks, strict=True):
        names = [name for name, child in block.mlp.named_children() if isinstance(child, nn.Linear)]
        for name, layer in zip(names, (*ours.mlp.columns, ours.mlp.row), strict=True):
            setattr(block.mlp, name, layer)
        ours.mlp = block.mlp
    return adapter.forward  # type: ignore[no-any-return]


def without_slices(adapter: FamilyAdapter, theirs: Any) -> Run:
    """All outputs of a Linear in one go."""
    return _with_constant(adapter, "_SLICE")


def without_blocks(adapter: FamilyAdapter, theirs: Any) -> Run:
    """All rows in one go."""
    return _with_constant(adapter, "BLOCK")


def _with_constant(adapter: FamilyAdapter, name: str) -> Run:
    def run(batch: Mapping[str, Tensor]) -> Any:
        before = getattr(linear, name)
        setattr(linear, name, 1 << 30)
        try:
            return adapter.forward(batch)
        finally:
            setattr(linear, name, before)

    return run


PARTS: dict[str, Callable[[Any, Any], Run]] = {
    "patches": without_patches,
    "attention": without_attention,
    "feed_forward": without_feed_forward,
    "slices": without_slices,
    "blocks": without_blocks,
}
