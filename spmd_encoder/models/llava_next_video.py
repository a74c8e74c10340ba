"""LLaVA-NeXT-Video: pictures as LLaVA-NeXT's, and films, of which each frame's patches are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next_video.configuration_llava_next_video import LlavaNextVideoConfig
from transformers.models.llava_next_video.modeling_llava_next_video import LlavaNextVideoForConditionalGeneration

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.frame_films import NextVideoFilms
from spmd_encoder.models.llava import class_rows
from spmd_encoder.models.llava_next import AnyResPreprocessor, LlavaNextAdapter, any_resolution, film_rows
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA
from spmd_encoder.models.weights import from_folder


class LlavaNextVideoAdapter(LlavaNextAdapter):
    """As LLaVA-NeXT's; a film's rows are those of each frame, one for `spatial_pool_stride` squared patches."""

    model_types = ("llava_next_video",)
    family = "llava_next_video"
    modalities = (Modality.IMAGE, Modality.VIDEO)
    model_class = LlavaNextVideoForConditionalGeneration
    config_class = LlavaNextVideoConfig
    kept = (*LlavaNextAdapter.kept, "model.vision_resampler")

    @classmethod
    def load_preprocessor(cls, folder: Path) -> AnyResPreprocessor:
        processor: Any = from_folder(LlavaNextImageProcessorPil, folder)
        config: Any = from_folder(LlavaNextVideoConfig, folder)
        if class_rows(config):
            raise StartupError(f"{folder}: films need vision_feature_select_strategy 'default', which drops one row")
        preprocessor = AnyResPreprocessor(processor, config, any_resolution(processor, config, folder))
        side, patch = config.vision_config.image_size, config.vision_config.patch_size
        rows = (side // patch // config.spatial_pool_stride) ** 2
        return preprocessor.with_films(NextVideoFilms.load(folder, side, patch, rows))

    def rows(self, inputs: dict[str, Tensor], tiles: list[int]) -> Sequence[Tensor]:
        if "image_sizes" in inputs:
            return super().rows(inputs, tiles)
        return film_rows(self._model, inputs["pixel_values"], tiles)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        pinpoints = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]
        config = LlavaNextVideoConfig(
            vision_config={**TINY_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
            text_config=TINY_LLAMA,
            image_token_index=60,
            video_token_index=61,
            image_grid_pinpoints=pinpoints,
        )
        processor = LlavaNextImageProcessorPil(
            size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}, image_grid_pinpoints=pinpoints
        )
        write_random(cls.model_class, config, processor, out, seed)
