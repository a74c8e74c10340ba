"""PaliGemma and PaliGemma 2: one picture of a fixed size, a row per patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.paligemma.configuration_paligemma import PaliGemmaConfig
from transformers.models.paligemma.modeling_paligemma import PaliGemmaForConditionalGeneration
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import TINY_LLAMA, VISION, TilePreprocessor, VisionLanguageAdapter, single_tile
from spmd_encoder.models.weights import from_folder


class PaliGemmaAdapter(VisionLanguageAdapter):
    """`tokens` `[patches, dim]`. The projector is a single layer: every rank has all of it."""

    model_types = ("paligemma",)
    family = "paligemma"
    model_class = PaliGemmaForConditionalGeneration
    config_class = PaliGemmaConfig

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return tower_plan(VISION, config.vision_config)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> TilePreprocessor:
        config: Any = from_folder(PaliGemmaConfig, folder)
        vision = config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        return single_tile(from_folder(SiglipImageProcessorPil, folder), vision, patches, folder)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = PaliGemmaConfig(
            vision_config={
                **TINY_VISION,
                "model_type": "siglip_vision_model",
                "image_size": 112,
                "patch_size": 14,
                "projection_dim": 56,
                "vision_use_head": False,
            },
            text_config={**TINY_LLAMA, "model_type": "gemma", "head_dim": 16},
            image_token_index=60,
            projection_dim=56,
        )
        processor = SiglipImageProcessorPil(size={"height": 112, "width": 112})
        write_random(cls.model_class, config, processor, out, seed)
