"""Qwen2.5-VL's vision tower and merger: one row per placeholder token of the language model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, TowerOutput
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes

_TOWER = "model.visual"


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over two segments, without rotation (angle 0)."""
    rows = hidden.shape[0]
    ends = torch.tensor([0, rows // 3, rows], dtype=torch.int32, device=hidden.device)
    angle = torch.zeros(rows, int(attention.head_dim), device=hidden.device)  # type: ignore[arg-type]
    out: Tensor = attention(hidden, cu_seqlens=ends, position_embeddings=(angle.cos(), angle.sin()), max_seqlen=rows)
    return out


def _plan(config: Any) -> TowerPlan:
    return TowerPlan(
        blocks=f"{_TOWER}.blocks",
        num_blocks=config.depth,
        in_block=(
            Split(path="attn", columns=("qkv",), parts=3, row="proj", heads="num_heads", run=_run_attention),
            Split(path="mlp", columns=("gate_proj", "up_proj"), row="down_proj"),
        ),
        once=(Split(path=f"{_TOWER}.merger.mlp", columns=("0",), row="2"),),
    )


class Qwen25VLAdapter(FamilyAdapter):
    """`tokens` `[t * h * w / merge**2, out_hidden_size]`, equal to `get_image_features` of the whole model."""

    model_types = ("qwen2_5_vl",)
    family = "qwen2_5_vl"
    modalities = (Modality.IMAGE,)
    outputs = (OutputKind.TOKENS,)
    default_output = OutputKind.TOKENS

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration, processor: Any, device: torch.device) -> None:
        self._model = model
        self._processor = processor
        self._device = device
        self._merge_area = int(processor.merge_size) ** 2
        vision: Any = model.config.vision_config
        self.embedding_dim = int(vision.out_hidden_size)
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Qwen25VLAdapter:
        processor: Any = from_folder(Qwen2VLImageProcessorPil, folder)
        config = from_folder(Qwen2_5_VLConfig, folder)
        vision: Any = config.vision_config
        made = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        taken = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        if made != taken:
            raise StartupError(
                f"{folder}: preprocessor_config.json makes patches of (patch, merge, temporal) sizes {made}, "
                f"but config.json asks for {taken}"
            )
        model = load_tower(Qwen2_5_VLForConditionalGeneration, config, folder, _TOWER, _plan(vision), context)
        return cls(model, processor, context.device)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Qwen2_5_VLConfig(
            vision_config={
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 100,  # not divisible by 3, as the real 3420 is not by 8
                "num_heads": 4,
                "out_hidden_size": 96,
                "window_size": 112,
                "fullatt_block_indexes": [1, 3],
            },
            text_config={
                "vocab_size": 64,
                "hidden_size": 96,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            image_token_id=60,
            video_token_id=61,
            vision_start_token_id=62,
            vision_end_token_id=63,
        )
        write_random(Qwen2_5_VLForConditionalGeneration, config, Qwen2VLImageProcessorPil(), out, seed)

    def cost_table(self) -> CostTable:
        size = self._processor.size
        return CostTable(
            patch=self._processor.patch_size,
            merge=self._processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self._processor, image)
        pixels, grid = made["pixel_values"], made["image_grid_thw"]
        t, h, w = (int(n) for n in grid[0])
        return Features(
            tensors={"pixel_values": pixels, "image_grid_thw": grid},
            num_tokens=t * h * w // self._merge_area,
            cost=t * h * w,
            grid=(t, h, w),
        )

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[all patches, patch values]` float32, `image_grid_thw` `[items, 3]` int64."""
        return {name: torch.cat([item.tensors[name] for item in items]) for name in ("pixel_values", "image_grid_thw")}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        # With sdpa transformers runs one attention call per window or picture: no mask over the whole batch.
        out = self._model.get_image_features(
            pixel_values=batch["pixel_values"].to(self._device),
            image_grid_thw=batch["image_grid_thw"].to(self._device),
        )
        return [TowerOutput(tokens=tokens) for tokens in out.pooler_output]
