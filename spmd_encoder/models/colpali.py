"""ColPali: a vector per token of a prompt around one picture of a fixed size, through PaliGemma's language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers.models.colpali.configuration_colpali import ColPaliConfig
from transformers.models.colpali.modeling_colpali import ColPaliForRetrieval
from transformers.models.colpali.processing_colpali import ColPaliProcessor
from transformers.models.paligemma.configuration_paligemma import PaliGemmaConfig
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from spmd_encoder.api.cost import CostTable
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.fixed_size import input_size_of
from spmd_encoder.models.language import language_plan
from spmd_encoder.models.multi_vector import MultiVectorAdapter, prompt_of
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import tiny_tokenizer, write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import TINY_LLAMA
from spmd_encoder.models.weights import from_folder


class ColPaliPreprocessor(Preprocessor):
    """`pixel_values` `[1, 3, height, width]`, and `input_ids` `[rows]` of the prompt, which is the same for all."""

    def __init__(self, processor: Any, side: int, patch: int) -> None:
        self.processor = processor
        self._side = side
        self._patch = patch

    def cost_table(self) -> CostTable:
        return CostTable(patch=self._patch, fixed_tokens=self._side**2)

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self.processor, image)
        ids, details = prompt_of(made, self.processor.image_token_id)
        return Features(
            tensors={"pixel_values": made["pixel_values"], "input_ids": ids},
            num_tokens=len(ids),
            cost=self._side**2,
            grid=(1, self._side, self._side),
            details=details,
        )


class ColPaliAdapter(MultiVectorAdapter):
    """All rows of the prompt see each other."""

    model_types = ("colpali",)
    family = "colpali"
    model_class = ColPaliForRetrieval
    config_class = ColPaliConfig
    first_position = 1

    @classmethod
    def load_preprocessor(cls, folder: Path) -> ColPaliPreprocessor:
        picture_processor: Any = from_folder(SiglipImageProcessorPil, folder)
        config: Any = from_folder(ColPaliConfig, folder)
        vision = config.vlm_config.vision_config
        side = input_size_of(vision, picture_processor, folder)[0] // vision.patch_size
        processor: Any = from_folder(ColPaliProcessor, folder, backend="pil")
        if processor.image_seq_length != side**2:
            raise StartupError(
                f"{folder}: the processor's prompt has {processor.image_seq_length} places for a picture, but "
                f"config.json asks for {side**2}"
            )
        return ColPaliPreprocessor(processor, side, int(vision.patch_size))

    @classmethod
    def plan(cls, vlm: Any) -> TowerPlan:
        text = vlm.text_config
        if text.model_type != "gemma":  # Gemma 2 has windows, and a bound on attention's scores
            raise StartupError(
                f"ColPali with a language model of type {text.model_type!r} is not supported here; supported is: gemma"
            )
        language = language_plan("vlm.language_model.layers", text, is_causal=cls.is_causal)
        return replace(tower_plan("vlm.vision_tower", vlm.vision_config), others=(language,))

    def picture_rows(self, batch: Mapping[str, Tensor]) -> Tensor:
        model: Any = self._model
        rows: Tensor = model.vlm.get_image_features(batch["pixel_values"].to(model.dtype)).pooler_output
        return rows.flatten(0, 1)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        vlm = PaliGemmaConfig(
            vision_config={
                **TINY_VISION,
                "model_type": "siglip_vision_model",
                "image_size": 112,
                "patch_size": 14,
                "projection_dim": 56,
                "vision_use_head": False,
            },
            text_config={**TINY_LLAMA, "model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
            image_token_index=10,
            projection_dim=56,
        )
        pictures: Any = SiglipImageProcessorPil(size={"height": 112, "width": 112})
        pictures.image_seq_length = 64
        tokenizer = tiny_tokenizer("<pad>", "<bos>", "<eos>", "<image>")
        write_random(cls.model_class, ColPaliConfig(vlm_config=vlm), ColPaliProcessor(pictures, tokenizer), out, seed)
