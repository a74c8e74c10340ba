"""SigLIP 2 with NaFlex: pictures keep their aspect and have up to `max_num_patches` patches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.models.siglip2.configuration_siglip2 import Siglip2Config, Siglip2VisionConfig
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.models.siglip2.modeling_siglip2 import Siglip2Model, Siglip2VisionModel

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor, TowerOutput
from spmd_encoder.models.contrastive import TINY_TEXT, TINY_VISION, encoder_plan, pooling_head_dims
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes


class Siglip2Preprocessor(Preprocessor):
    """Patches of one picture, `[h * w, patch values]`, scaled up or down to near the most that the processor allows."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def cost_table(self) -> CostTable:
        # Small pictures are scaled up: nearly all come close to the most.
        return CostTable(patch=self.processor.patch_size, fixed_tokens=self.processor.max_num_patches)

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self.processor, image)
        h, w = (int(n) for n in made["spatial_shapes"][0])
        # The processor pads every picture to the most patches. What a batch really needs, `pack` adds.
        return Features(
            tensors={"pixel_values": made["pixel_values"][0, : h * w], "spatial_shapes": made["spatial_shapes"]},
            num_tokens=h * w,
            cost=h * w,
            grid=(1, h, w),
        )


class Siglip2Adapter(FamilyAdapter):
    """`pooled` `[hidden]` is `get_image_features` (the attention-pooling head), not normalised; `tokens`
    `[patches, hidden]` is `last_hidden_state` without padding, row by row of the grid.

    A vision half that was saved without its head has tokens only. Checkpoints of SigLIP 2 with a fixed resolution
    say model type `siglip`, and are served by that family.
    """

    model_types = ("siglip2", "siglip2_vision_model")
    family = "siglip2"
    modalities = (Modality.IMAGE,)

    def __init__(self, model: Siglip2VisionModel, preprocessor: Preprocessor, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        self.embedding_dims = pooling_head_dims(model.config)
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> Siglip2Preprocessor:
        return Siglip2Preprocessor(from_folder(Siglip2ImageProcessorPil, folder))

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Siglip2Adapter:
        preprocessor = cls.load_preprocessor(folder)
        processor = preprocessor.processor
        # Of a whole checkpoint's configuration this class takes the vision half.
        config: Any = from_folder(Siglip2VisionConfig, folder)
        if processor.patch_size != config.patch_size:
            raise StartupError(
                f"{folder}: preprocessor_config.json makes patches of {processor.patch_size} pixels, "
                f"but config.json asks for {config.patch_size}"
            )
        model = load_tower(Siglip2VisionModel, config, folder, "", encoder_plan("encoder.layers", config), context)
        return cls(model, preprocessor, context.device)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Siglip2Config(
            text_config=TINY_TEXT,
            vision_config={**TINY_VISION, "patch_size": 16, "num_patches": 36},
        )
        write_random(Siglip2Model, config, Siglip2ImageProcessorPil(patch_size=16, max_num_patches=64), out, seed)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[items, patches of the largest, patch values]` float32, padded with zeros;
        `spatial_shapes` `[items, 2]` int64, patches in (height, width)."""
        return {
            "pixel_values": pad_sequence([item.tensors["pixel_values"] for item in items], batch_first=True),
            "spatial_shapes": torch.cat([item.tensors["spatial_shapes"] for item in items]),
        }

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        pixels, shapes = batch["pixel_values"], batch["spatial_shapes"]
        lengths = shapes.prod(-1).tolist()
        mask = _padding_mask(lengths, pixels.shape[1])
        out = self._model(
            pixel_values=pixels.to(self._device),
            pixel_attention_mask=None if mask is None else mask.to(self._device),
            spatial_shapes=shapes.to(self._device),
        )
        tokens = [rows[:length] for rows, length in zip(out.last_hidden_state, lengths, strict=True)]
        return TowerOutput.of_batch(tokens, out.pooler_output)


def _padding_mask(lengths: Sequence[int], longest: int) -> Tensor | None:
    """`[items, 1, 1, longest]` bool, true where a patch is real; None where all are.

    It broadcasts over heads and queries. Of a mask `[items, longest]` transformers would make one of
    `[items, 1, longest, longest]`, which sdpa writes out.
    """
    if min(lengths) == longest:
        return None
    return (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None]
