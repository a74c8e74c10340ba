"""ColQwen2: a vector per token of a prompt around one picture of its own size, through Qwen2-VL's language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from PIL import Image
from torch import Tensor
from transformers.models.colqwen2.configuration_colqwen2 import ColQwen2Config
from transformers.models.colqwen2.modeling_colqwen2 import ColQwen2ForRetrieval
from transformers.models.colqwen2.processing_colqwen2 import ColQwen2Processor
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import Features, LoadContext
from spmd_encoder.models.language import language_plan
from spmd_encoder.models.multi_vector import MultiVectorAdapter, prompt_of
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.qwen2_vl import Qwen2VLAdapter
from spmd_encoder.models.qwen_vl import PatchEmbedding, PatchPreprocessor, check_patches, tiny_whole
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import tiny_tokenizer, write_random
from spmd_encoder.models.weights import from_folder


class ColQwen2Preprocessor(PatchPreprocessor):
    """Patches of one picture as Qwen2-VL's, and `input_ids` `[rows]` of the prompt around it."""

    def __init__(self, pictures: Any, whole: Any) -> None:
        super().__init__(pictures)
        self._whole = whole

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self._whole, image)
        ids, details = prompt_of(made, self._whole.image_token_id)
        grid = made["image_grid_thw"]
        t, h, w = (int(n) for n in grid[0])
        return Features(
            tensors={"pixel_values": made["pixel_values"][0], "image_grid_thw": grid, "input_ids": ids},
            num_tokens=len(ids),
            cost=t * h * w,
            grid=(t, h, w),
            details=details,
        )


class ColQwen2Adapter(MultiVectorAdapter):
    """A row sees earlier ones alone, and its position is its place in the prompt: transformers gives this model none of
    Qwen2-VL's positions in the picture."""

    model_types = ("colqwen2",)
    family = "colqwen2"
    model_class = ColQwen2ForRetrieval
    config_class = ColQwen2Config
    is_causal = True

    @classmethod
    def load_preprocessor(cls, folder: Path) -> ColQwen2Preprocessor:
        pictures: Any = from_folder(Qwen2VLImageProcessorPil, folder)
        config: Any = from_folder(ColQwen2Config, folder)
        check_patches(pictures, config.vlm_config.vision_config, folder)
        return ColQwen2Preprocessor(pictures, from_folder(ColQwen2Processor, folder, backend="pil"))

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        adapter = super().load(folder, context)
        tower: Any = adapter._model.get_submodule("vlm.visual")
        if context.device.type == "cpu":
            tower.patch_embed = PatchEmbedding(tower.patch_embed, fast=context.fast_linears)
        return adapter

    @classmethod
    def plan(cls, vlm: Any) -> TowerPlan:
        if vlm.model_type != "qwen2_vl" or "sliding_attention" in vlm.text_config.layer_types:
            raise StartupError(
                "ColQwen2 is supported here with Qwen2-VL without sliding windows; config.json asks for "
                f"{vlm.model_type!r} with layers {sorted(set(vlm.text_config.layer_types))}"
            )
        tower = Qwen2VLAdapter.plan(vlm.vision_config)
        (merger,) = tower.once
        language = language_plan("vlm.language_model.layers", vlm.text_config, is_causal=cls.is_causal)
        return replace(
            tower, blocks="vlm.visual.blocks", once=(replace(merger, path="vlm.visual.merger.mlp"),), others=(language,)
        )

    def picture_rows(self, batch: Mapping[str, Tensor]) -> Tensor:
        tower: Any = self._model.get_submodule("vlm.visual")
        rows: Tensor = tower(batch["pixel_values"].to(tower.dtype), grid_thw=batch["image_grid_thw"]).pooler_output
        return rows

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        whole = tiny_whole(96)
        positions = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4]}
        vlm = Qwen2VLConfig(
            vision_config={"depth": 3, "embed_dim": 64, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 2},
            text_config={**whole["text_config"], "rope_parameters": positions},
            image_token_id=10,
        )
        tokenizer = tiny_tokenizer(
            "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
        )
        processor = ColQwen2Processor(Qwen2VLImageProcessorPil(), tokenizer)
        write_random(cls.model_class, ColQwen2Config(vlm_config=vlm), processor, out, seed)
