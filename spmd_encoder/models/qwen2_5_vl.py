"""Qwen2.5-VL's vision tower and merger: one row per placeholder token of the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.qwen_video import Qwen25Films
from spmd_encoder.models.qwen_vl import ATTENTION, TOWER, QwenVLAdapter, tiny_whole
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random


class Qwen25VLAdapter(QwenVLAdapter):
    """`tokens` `[t * h * w / merge**2, out_hidden_size]`, equal to `get_image_features` of the whole model."""

    model_types = ("qwen2_5_vl",)
    family = "qwen2_5_vl"
    model_class = Qwen2_5_VLForConditionalGeneration
    films = Qwen25Films
    config_class = Qwen2_5_VLConfig

    @classmethod
    def plan(cls, vision: Any) -> TowerPlan:
        return TowerPlan(
            blocks=f"{TOWER}.blocks",
            num_blocks=vision.depth,
            in_block=(ATTENTION, feed_forward("gate_proj", "up_proj", row="down_proj", activation="act_fn")),
            once=(Split(path=f"{TOWER}.merger.mlp", columns=("0",), row="2"),),
        )

    @classmethod
    def width(cls, vision: Any) -> int:
        return int(vision.out_hidden_size)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Qwen2_5_VLConfig(
            vision_config={
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 100,  # not divisible by 3, as the real 3420 is not by 8
                "num_heads": 4,
                "out_hidden_size": 96,
                "window_size": 112,
                "fullatt_block_indexes": [1, 3],
            },
            **tiny_whole(96),
        )
        write_random(cls.model_class, config, Qwen2VLImageProcessorPil(), out, seed)
