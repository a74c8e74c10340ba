"""DINOv2: one vector per picture (the class token) and one per patch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.dinov2.configuration_dinov2 import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Model

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, TowerOutput
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    out: Tensor = attention(hidden.unsqueeze(0))[0]
    return out.squeeze(0)


def _plan(config: Any) -> TowerPlan:
    mlp = (
        Split(path="mlp", columns=("gate_proj", "up_proj"), row="down_proj")
        if config.use_swiglu_ffn
        else Split(path="mlp", columns=("fc1",), row="fc2")
    )
    attention = Split(
        path="attention",
        columns=("q_proj", "k_proj", "v_proj"),
        row="o_proj",
        heads="num_attention_heads",
        run=_run_attention,
    )
    return TowerPlan(blocks="encoder.layer", num_blocks=config.num_hidden_layers, in_block=(attention, mlp))


class Dinov2Adapter(FamilyAdapter):
    """`pooled` `[hidden]` is transformers' `pooler_output` (the class token after the last norm), `tokens`
    `[patches, hidden]` is the rest of `last_hidden_state`."""

    model_types = ("dinov2",)
    family = "dinov2"
    modalities = (Modality.IMAGE,)
    outputs = (OutputKind.TOKENS, OutputKind.POOLED)
    default_output = OutputKind.POOLED

    def __init__(self, model: Dinov2Model, processor: Any, size: tuple[int, int], device: torch.device) -> None:
        self._model = model
        self._processor = processor
        self._device = device
        config: Any = model.config
        self._patch = int(config.patch_size)
        self._grid = (1, size[0] // self._patch, size[1] // self._patch)
        self.embedding_dim = int(config.hidden_size)
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Dinov2Adapter:
        processor: Any = from_folder(BitImageProcessorPil, folder)
        config = from_folder(Dinov2Config, folder)
        model = load_tower(Dinov2Model, config, folder, "", _plan(config), context)
        return cls(model, processor, _input_size(processor, folder), context.device)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Dinov2Config(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,  # not divisible by 4
            image_size=112,  # fewer positions than the 224 pixels below need, as real checkpoints have more
            patch_size=14,
        )
        processor = BitImageProcessorPil(
            size={"shortest_edge": 256},
            crop_size={"height": 224, "width": 224},
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
        write_random(Dinov2Model, config, processor, out, seed)

    def cost_table(self) -> CostTable:
        return CostTable(patch=self._patch, fixed_tokens=self._grid[1] * self._grid[2])

    def preprocess(self, image: Image.Image) -> Features:
        patches = self._grid[1] * self._grid[2]
        pixels = run_processor(self._processor, image)["pixel_values"]
        return Features(tensors={"pixel_values": pixels}, num_tokens=patches, cost=patches, grid=self._grid)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[items, 3, height, width]` float32."""
        return {"pixel_values": torch.cat([item.tensors["pixel_values"] for item in items])}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        out = self._model(pixel_values=batch["pixel_values"].to(self._device))
        return [
            TowerOutput(tokens=hidden[1:], pooled=pooled)
            for hidden, pooled in zip(out.last_hidden_state, out.pooler_output, strict=True)
        ]


def _input_size(processor: Any, folder: Path) -> tuple[int, int]:
    """(height, width) that the processor gives every picture."""
    size = processor.crop_size if processor.do_center_crop else processor.size if processor.do_resize else None
    if not size or not size.get("height") or not size.get("width"):
        raise StartupError(f"{folder}: preprocessor_config.json does not bring pictures to one size, which is needed")
    return int(size["height"]), int(size["width"])
