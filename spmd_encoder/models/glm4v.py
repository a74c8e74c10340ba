"""GLM-4.1V, 4.5V and 4.6V: one row per placeholder token of the language model, which is dense or has experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.glm4v.configuration_glm4v import Glm4vConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vForConditionalGeneration
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeForConditionalGeneration
from transformers.models.glm46v.configuration_glm46v import Glm46VConfig
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.modeling_glm46v import Glm46VForConditionalGeneration

from spmd_encoder.api.cost import CostTable
from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.glm_video import Glm4vFilms, Glm46VFilms
from spmd_encoder.models.qwen_video import QwenFilms
from spmd_encoder.models.qwen_vl import ATTENTION, TOWER, QwenPreprocessor, QwenVLAdapter, patches_of, tiny_whole
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder


class GlmPreprocessor(QwenPreprocessor):
    """As Qwen's, but a picture counts as a film of two frames: its bounds are of pixels in both."""

    def cost_table(self) -> CostTable:
        table, frames = super().cost_table(), self.processor.temporal_patch_size
        least, most = table.min_pixels // frames, table.max_pixels // frames
        return replace(table, min_pixels=least, max_pixels=most, raises_short_sides=True)


class Glm4vAdapter(QwenVLAdapter):
    """`tokens` `[t * h * w / merge**2, out_hidden_size]`, equal to `get_image_features` of the whole model."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4v",)
    family = "glm4v"
    films: ClassVar[type[QwenFilms]] = Glm4vFilms
    model_class: ClassVar[type[PreTrainedModel]] = Glm4vForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Glm4vConfig
    processor_class: ClassVar[type[Any]] = Glm4vImageProcessorPil
    tiny_language: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @classmethod
    def load_preprocessor(cls, folder: Path) -> GlmPreprocessor:
        pictures = from_folder(cls.processor_class, folder)
        return GlmPreprocessor(pictures, cls.films.load(folder, patches_of(pictures)))

    def ask(self, pixels: Tensor, grids: Tensor) -> Any:
        # The method for films: it makes each layer a picture of its own, which the tower's positions need.
        model: Any = self._model
        return model.get_video_features(pixel_values_videos=pixels, video_grid_thw=grids)

    @classmethod
    def plan(cls, vision: Any) -> TowerPlan:
        gated = feed_forward("gate_proj", "up_proj", row="down_proj", activation="act_fn")
        merger = Split(path=f"{TOWER}.merger", columns=("gate_proj", "up_proj"), row="down_proj")
        return TowerPlan(blocks=f"{TOWER}.blocks", num_blocks=vision.depth, in_block=(ATTENTION, gated), once=(merger,))

    @classmethod
    def width(cls, vision: Any) -> int:
        return int(vision.out_hidden_size)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        whole = tiny_whole(96)
        config = cls.config_class(
            **whole
            | {
                "vision_config": {
                    "depth": 3,
                    "hidden_size": 64,
                    "intermediate_size": 100,
                    "num_heads": 4,
                    "out_hidden_size": 96,
                    "image_size": 112,
                },
                "text_config": whole["text_config"] | cls.tiny_language,
                "image_start_token_id": 62,
                "image_end_token_id": 63,
            }
        )
        processor = cls.processor_class(size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 3000})
        write_random(cls.model_class, config, processor, out, seed)


class Glm4vMoeAdapter(Glm4vAdapter):
    """As the dense model's."""

    model_types = ("glm4v_moe",)
    family = "glm4v_moe"
    model_class = Glm4vMoeForConditionalGeneration
    config_class = Glm4vMoeConfig
    tiny_language = MappingProxyType(
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
    )


class Glm46VAdapter(Glm4vAdapter):
    """As GLM-4.1V's, whose tower it has."""

    model_types = ("glm46v",)
    family = "glm46v"
    model_class = Glm46VForConditionalGeneration
    config_class = Glm46VConfig
    processor_class = Glm46VImageProcessorPil
    films = Glm46VFilms
