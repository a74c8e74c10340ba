"""SigLIP, and SigLIP 2 at a fixed resolution: one vector per picture in the space of texts, and one row per patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.siglip.configuration_siglip import SiglipConfig, SiglipVisionConfig
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip.modeling_siglip import SiglipModel, SiglipVisionModel

from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.contrastive import TINY_TEXT, TINY_VISION, encoder_plan, pooling_head_dims
from spmd_encoder.models.fixed_size import FixedSizeAdapter, FixedSizePreprocessor, input_size_of
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower


class SiglipAdapter(FixedSizeAdapter):
    """`pooled` `[hidden]` is `get_image_features` (the attention-pooling head), not normalised; `tokens`
    `[patches, hidden]` is `last_hidden_state`. A vision half that was saved without its head has tokens only."""

    model_types = ("siglip", "siglip_vision_model")
    family = "siglip"

    @classmethod
    def load_preprocessor(cls, folder: Path) -> FixedSizePreprocessor:
        processor: Any = from_folder(SiglipImageProcessorPil, folder)
        # Of a whole checkpoint's configuration this class takes the vision half.
        config: Any = from_folder(SiglipVisionConfig, folder)
        return FixedSizePreprocessor(processor, input_size_of(config, processor, folder), config.patch_size)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> SiglipAdapter:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(SiglipVisionConfig, folder)
        model = load_tower(SiglipVisionModel, config, folder, "", encoder_plan("encoder.layers", config), context)
        return cls(model, preprocessor, pooling_head_dims(config), context.device)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = SiglipConfig(
            text_config=TINY_TEXT,
            vision_config={**TINY_VISION, "image_size": 100, "patch_size": 16},  # does not divide, as 384 by 14
        )
        processor = SiglipImageProcessorPil(size={"height": 100, "width": 100})
        write_random(SiglipModel, config, processor, out, seed)
