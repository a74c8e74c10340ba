"""LLaVA-OneVision: as LLaVA-NeXT over a SigLIP tower, with large pictures' joined tiles scaled down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers.models.llava_onevision.configuration_llava_onevision import LlavaOnevisionConfig
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionForConditionalGeneration

from spmd_encoder.api.types import Modality
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.frame_films import OnevisionFilms
from spmd_encoder.models.llava_next import AnyResPreprocessor, LlavaNextAdapter, any_resolution, film_rows
from spmd_encoder.models.picture import refused
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA
from spmd_encoder.models.weights import from_folder

_TOLERATED = 1.1
"""How much longer than allowed, per side, the joined tiles may be before they are scaled down."""


class OnevisionPreprocessor(AnyResPreprocessor):
    def __init__(self, processor: Any, config: Any, folder: Path) -> None:
        super().__init__(processor, config, any_resolution(processor, config, folder))
        self._most_tiles = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))

    def joined(self, image: Image.Image) -> tuple[int, int]:
        height, width = super().joined(image)
        ratio = math.sqrt(height * width / (self._most_tiles * self._patches[0] ** 2))
        if ratio <= _TOLERATED:
            return height, width
        scaled = int(height // ratio), int(width // ratio)
        if not all(scaled):
            raise refused(image.size, "its shorter side is less than a patch when its tiles are scaled down")
        return scaled


class LlavaOnevisionAdapter(LlavaNextAdapter):
    """As LLaVA-NeXT's, of single pictures: those of a request with several are cut into tiles too.

    A film's rows are those of each frame, a quarter of its patches, and a newline behind them all.
    """

    model_types = ("llava_onevision",)
    family = "llava_onevision"
    modalities = (Modality.IMAGE, Modality.VIDEO)
    model_class = LlavaOnevisionForConditionalGeneration
    config_class = LlavaOnevisionConfig

    @classmethod
    def load_preprocessor(cls, folder: Path) -> OnevisionPreprocessor:
        config: Any = from_folder(LlavaOnevisionConfig, folder)
        preprocessor = OnevisionPreprocessor(from_folder(LlavaOnevisionImageProcessorPil, folder), config, folder)
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        rows = math.ceil(side // patch / 2) ** 2
        return preprocessor.with_films(OnevisionFilms.load(folder, side, patch, rows))

    def rows(self, inputs: dict[str, Tensor], tiles: list[int]) -> Sequence[Tensor]:
        if "image_sizes" in inputs:
            return super().rows(inputs, tiles)
        return film_rows(self._model, inputs["pixel_values"], tiles, closing=OnevisionFilms.closing_rows)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        pinpoints = [[112 * rows, 112 * columns] for rows in range(1, 4) for columns in range(1, 4)]
        config = LlavaOnevisionConfig(
            vision_config={
                **TINY_VISION,
                "model_type": "siglip_vision_model",
                "image_size": 112,
                "patch_size": 14,
                "vision_use_head": False,
            },
            text_config=TINY_LLAMA,
            image_token_index=60,
            video_token_index=61,
            image_grid_pinpoints=pinpoints,
            vision_aspect_ratio="anyres_max_4",
        )
        processor = LlavaOnevisionImageProcessorPil(
            size={"height": 112, "width": 112},
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
            image_grid_pinpoints=pinpoints,
        )
        write_random(cls.model_class, config, processor, out, seed)
