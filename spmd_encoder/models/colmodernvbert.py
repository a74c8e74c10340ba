"""ColModernVBert: a vector per token of a prompt around one picture in tiles, through ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from transformers.models.colmodernvbert.configuration_colmodernvbert import ColModernVBertConfig
from transformers.models.colmodernvbert.modeling_colmodernvbert import ColModernVBertForRetrieval
from transformers.models.colmodernvbert.processing_colmodernvbert import ColModernVBertProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.modernvbert.configuration_modernvbert import ModernVBertConfig

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.tiling import Tiling
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.multi_vector import MultiVectorAdapter, prompt_of
from spmd_encoder.models.near_attention import modernbert_plan
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import tiny_tokenizer, write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.weights import from_folder


class ColModernVBertPreprocessor(Preprocessor):
    """`pixel_values` `[tiles, 3, height, width]`, tiles row by row, then the whole picture, and `input_ids` `[rows]` of
    the prompt, which names the place of each tile."""

    def __init__(self, processor: Any, side: int, patch: int) -> None:
        self.processor = processor
        pictures, self._patches = processor.image_processor, side // patch
        # Without splitting there is one tile, whose size is the same.
        edge = pictures.size["longest_edge"] if pictures.do_image_splitting else side
        tiling = Tiling(rule="edge", side=side, edge=edge)
        self._cost = CostTable(patch=patch, fixed_tokens=self._patches**2, tiling=tiling)

    def cost_table(self) -> CostTable:
        return self._cost

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self.processor.process_images, image)
        ids, details = prompt_of(made, self.processor.image_token_id)
        (pixels,) = made["pixel_values"]
        return Features(
            tensors={"pixel_values": pixels, "input_ids": ids},
            num_tokens=len(ids),
            cost=len(pixels) * self._patches**2,
            grid=(len(pixels), self._patches, self._patches),
            details=details,
        )


class ColModernVBertAdapter(MultiVectorAdapter):
    """All rows of the prompt see each other in every third layer, in the others those that are near."""

    model_types = ("colmodernvbert",)
    family = "colmodernvbert"
    model_class = ColModernVBertForRetrieval
    config_class = ColModernVBertConfig

    @classmethod
    def load_preprocessor(cls, folder: Path) -> ColModernVBertPreprocessor:
        pictures: Any = from_folder(Idefics3ImageProcessorPil, folder)
        config: Any = from_folder(ColModernVBertConfig, folder)
        vlm, side = config.vlm_config, int(pictures.max_image_size["longest_edge"])
        vision = vlm.vision_config
        if side != vision.image_size:
            raise StartupError(
                f"{folder}: preprocessor_config.json makes tiles of {side} pixels a side, but config.json asks for "
                f"{vision.image_size}"
            )
        processor: Any = from_folder(ColModernVBertProcessor, folder, backend="pil")
        rows = (side // vision.patch_size // vlm.pixel_shuffle_factor) ** 2
        if processor.image_seq_len != rows:
            raise StartupError(
                f"{folder}: the processor's prompt has {processor.image_seq_len} places for a tile, but config.json "
                f"asks for {rows}"
            )
        return ColModernVBertPreprocessor(processor, side, int(vision.patch_size))

    @classmethod
    def plan(cls, vlm: Any) -> TowerPlan:
        language = modernbert_plan("vlm.text_model.layers", vlm.text_config)
        return replace(tower_plan("vlm.vision_model", vlm.vision_config), others=(language,))

    def picture_rows(self, batch: Mapping[str, Tensor]) -> Tensor:
        # As if all tiles were those of one prompt, which needs no padding.
        model: Any = self._model
        (rows,) = model.vlm.get_image_features(batch["pixel_values"][None]).pooler_output
        return rows  # type: ignore[no-any-return]

    def read(self, prompts: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        model: Any = self._model
        no_masks = {"full_attention": None, "sliding_attention": None}
        hidden: Tensor = model.vlm.text_model(
            inputs_embeds=prompts, position_ids=positions, attention_mask=no_masks, cu_seqlens=ends
        ).last_hidden_state
        return hidden

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        vlm = ModernVBertConfig(
            vision_config={**TINY_VISION, "model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14},
            text_config={
                "model_type": "modernbert",
                "vocab_size": 64,
                "hidden_size": 48,
                "intermediate_size": 52,
                "num_hidden_layers": 3,  # the first sees all, the others are near-sighted
                "num_attention_heads": 6,
                "local_attention": 16,
                **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 7),
            },
            image_token_id=9,
            pixel_shuffle_factor=2,
        )
        tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        tokenizer = tiny_tokenizer(
            *("<pad>", "<|begin_of_text|>", "<image>", "<fake_token_around_image>", "<global-img>"),
            *("<end_of_utterance>", *tags),
        )
        pictures = Idefics3ImageProcessorPil(size={"longest_edge": 336}, max_image_size={"longest_edge": 112})
        processor = ColModernVBertProcessor(pictures, tokenizer, image_seq_len=16)
        write_random(cls.model_class, ColModernVBertConfig(vlm_config=vlm), processor, out, seed)
