"""Gemma 3: one picture of a fixed size, its patches averaged to 256 rows; with pan and scan its crops too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForConditionalGeneration

from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import TINY_LLAMA, VISION, TilePreprocessor, VisionLanguageAdapter, single_tile
from spmd_encoder.models.weights import from_folder


class Gemma3Adapter(VisionLanguageAdapter):
    """`tokens` `[rows, dim]`. Where the checkpoint asks for pan and scan, the rows of the crops follow the picture's.

    The projector is one matrix that is no Linear: every rank has all of it.
    """

    model_types = ("gemma3",)
    family = "gemma3"
    model_class = Gemma3ForConditionalGeneration
    config_class = Gemma3Config

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return tower_plan(VISION, config.vision_config)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> TilePreprocessor:
        config: Any = from_folder(Gemma3Config, folder)
        processor = from_folder(Gemma3ImageProcessorPil, folder)
        return single_tile(processor, config.vision_config, config.mm_tokens_per_image, folder)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Gemma3Config(
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14, "vision_use_head": False},
            text_config={**TINY_LLAMA, "model_type": "gemma3_text", "head_dim": 16},
            mm_tokens_per_image=16,
            image_token_index=60,
            boi_token_index=61,
            eoi_token_index=62,
        )
        processor = Gemma3ImageProcessorPil(size={"height": 112, "width": 112}, image_seq_length=16)
        write_random(cls.model_class, config, processor, out, seed)
