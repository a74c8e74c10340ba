"""LLaVA-1.5 and its kin: one tile per picture, through a CLIP or SigLIP tower, or whole pictures through Pixtral's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.configuration_llava import LlavaConfig
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

from spmd_encoder.models.base import Preprocessor
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.picture import image_processor
from spmd_encoder.models.pixtral import PixtralPreprocessor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import PROJECTOR, TINY_LLAMA, VISION, VisionLanguageAdapter, single_tile
from spmd_encoder.models.weights import from_folder

PROJECTION = Split(path=PROJECTOR, columns=("linear_1",), row="linear_2")


class LlavaAdapter(VisionLanguageAdapter):
    """`tokens` `[rows, dim]`: a row per patch, with one for the class token where the checkpoint keeps it."""

    model_types = ("llava",)
    family = "llava"
    model_class = LlavaForConditionalGeneration
    config_class = LlavaConfig

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return tower_plan(VISION, config.vision_config, PROJECTION)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> Preprocessor:
        processor = image_processor(folder)
        config: Any = from_folder(LlavaConfig, folder)
        vision = config.vision_config
        if vision.model_type == "pixtral":
            return PixtralPreprocessor(processor, vision, folder, merge=1)
        patches = (vision.image_size // vision.patch_size) ** 2
        return single_tile(processor, vision, patches + class_rows(config), folder)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = LlavaConfig(
            vision_config={**TINY_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
            text_config=TINY_LLAMA,
            image_token_index=60,
            image_seq_length=64,
        )
        processor = CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
        write_random(cls.model_class, config, processor, out, seed)


def class_rows(config: Any) -> int:
    """Rows of one tile more than its patches: CLIP's class token, unless the checkpoint drops the first row."""
    class_token = int(config.vision_config.model_type == "clip_vision_model")
    return class_token - int(config.vision_feature_select_strategy == "default")
