"""Qwen3-VL's vision tower with its deepstack levels: one wide row per placeholder token of the language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.qwen_video import Qwen3Films
from spmd_encoder.models.qwen_vl import ATTENTION, TOWER, QwenVLAdapter, tiny_whole
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random


def _levels(vision: Any) -> int:
    """How many of the tower's layers go to the language model beside the last; Qwen3.5 has none of them."""
    return len(getattr(vision, "deepstack_visual_indexes", ()))


def _run_merger(merger: nn.Module, hidden: Tensor) -> Tensor:
    """Both kinds of merger: the last one's norm is over patches, those of the levels are over merged patches."""
    norm = merger.get_submodule("norm")
    assert isinstance(norm, nn.LayerNorm)
    out: Tensor = merger(hidden.reshape(-1, norm.normalized_shape[0]))
    return out


def _merger(path: str) -> Split:
    return Split(path=f"{TOWER}.{path}", columns=("linear_fc1",), row="linear_fc2", run=_run_merger)


def rows_with_levels(out: Any) -> Sequence[Tensor]:
    """The rows of each picture, each with its levels behind it, out of what `get_image_features` gives."""
    levels = getattr(out, "deepstack_features", ())
    return [torch.cat(parts, dim=-1) for parts in zip(out.pooler_output, *levels, strict=True)]


class Qwen3VLAdapter(QwenVLAdapter):
    """`tokens` `[t * h * w / merge**2, out_hidden_size * (1 + levels)]`.

    The first `out_hidden_size` values of a row are `pooler_output` of `get_image_features`, which take the
    placeholder's place; then come the `deepstack_features` of each level in order, which the language model adds to
    its first layers' hidden states.
    """

    model_types = ("qwen3_vl",)
    family = "qwen3_vl"
    model_class: ClassVar[type[PreTrainedModel]] = Qwen3VLForConditionalGeneration
    films = Qwen3Films
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen3VLConfig
    tiny_language: ClassVar[Mapping[str, Any]] = MappingProxyType({"head_dim": 12})
    """What the language half of the family's tiny configuration has beside the usual."""
    tiny_levels: ClassVar[Mapping[str, Any]] = MappingProxyType({"deepstack_visual_indexes": [1, 2]})

    @classmethod
    def plan(cls, vision: Any) -> TowerPlan:
        # The levels' mergers are cut too: each is larger than two blocks.
        return TowerPlan(
            blocks=f"{TOWER}.blocks",
            num_blocks=vision.depth,
            in_block=(ATTENTION, feed_forward("linear_fc1", row="linear_fc2", activation="act_fn")),
            once=(_merger("merger"), *(_merger(f"deepstack_merger_list.{level}") for level in range(_levels(vision)))),
        )

    @classmethod
    def width(cls, vision: Any) -> int:
        return int(vision.out_hidden_size) * (1 + _levels(vision))

    def rows(self, out: Any) -> Sequence[Tensor]:
        return rows_with_levels(out)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        whole = tiny_whole(48)
        config = cls.config_class(
            **whole
            | {
                "vision_config": {
                    "depth": 4,
                    "hidden_size": 64,
                    "intermediate_size": 100,
                    "num_heads": 4,
                    "out_hidden_size": 48,
                    "num_position_embeddings": 64,
                    **cls.tiny_levels,
                },
                "text_config": whole["text_config"] | cls.tiny_language,
            }
        )
        # As the real ones have it, with fewer pixels: they take 65536 at the least.
        processor = Qwen2VLImageProcessorPil(
            patch_size=16,
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
            size={"shortest_edge": 64 * 64, "longest_edge": 16777216},
        )
        write_random(cls.model_class, config, processor, out, seed)
