"""Qwen2-VL's vision tower and merger: one row per placeholder token of the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.qwen_video import Qwen2Films
from spmd_encoder.models.qwen_vl import ATTENTION, TOWER, QwenVLAdapter, tiny_whole
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random


class Qwen2VLAdapter(QwenVLAdapter):
    """`tokens` `[t * h * w / merge**2, hidden_size]`, equal to `get_image_features` of the whole model.

    `hidden_size` of this family's vision configuration is the language model's width; the tower's is `embed_dim`.
    """

    model_types = ("qwen2_vl",)
    family = "qwen2_vl"
    model_class = Qwen2VLForConditionalGeneration
    films = Qwen2Films
    config_class = Qwen2VLConfig

    @classmethod
    def plan(cls, vision: Any) -> TowerPlan:
        return TowerPlan(
            blocks=f"{TOWER}.blocks",
            num_blocks=vision.depth,
            in_block=(ATTENTION, feed_forward("fc1", row="fc2", activation="act")),
            once=(Split(path=f"{TOWER}.merger.mlp", columns=("0",), row="2"),),
        )

    @classmethod
    def width(cls, vision: Any) -> int:
        return int(vision.hidden_size)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Qwen2VLConfig(
            vision_config={"depth": 3, "embed_dim": 64, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 2},
            **tiny_whole(96),
        )
        write_random(cls.model_class, config, Qwen2VLImageProcessorPil(), out, seed)
