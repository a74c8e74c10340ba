"""DINOv3's vision transformers: one vector per picture (the class token) and one per patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.models.dinov3_vit.configuration_dinov3_vit import DINOv3ViTConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTModel

from spmd_encoder.api.types import OutputKind
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.dinov3_pictures import DINOv3Processor
from spmd_encoder.models.fixed_size import FixedSizeAdapter, FixedSizePreprocessor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """With a class token and rotated patches: all rows but the first."""
    width = int(attention.head_dim)  # type: ignore[arg-type]
    angles = torch.linspace(0, 6, len(hidden) - 1, device=hidden.device)[:, None].repeat(1, width)
    out: Tensor = attention(hidden[None], position_embeddings=(angles.cos().to(hidden), angles.sin().to(hidden)))[0]
    return out.squeeze(0)


def _plan(config: Any) -> TowerPlan:
    gates = ("gate_proj", "up_proj") if config.use_gated_mlp else ("up_proj",)
    attention = Split(
        path="attention", columns=("q_proj", "k_proj", "v_proj"), row="o_proj", heads="num_heads", run=_run_attention
    )
    feed_forward = Split(path="mlp", columns=gates, row="down_proj")
    return TowerPlan(blocks="model.layer", num_blocks=config.num_hidden_layers, in_block=(attention, feed_forward))


class DINOv3ViTAdapter(FixedSizeAdapter):
    """`pooled` `[hidden]` is transformers' `pooler_output` (the class token after the last norm), `tokens`
    `[patches, hidden]` is what follows the class token and the registers in `last_hidden_state`."""

    model_types = ("dinov3_vit",)
    family = "dinov3_vit"

    @classmethod
    def load_preprocessor(cls, folder: Path) -> FixedSizePreprocessor:
        processor = DINOv3Processor.from_folder(folder)
        config: Any = from_folder(DINOv3ViTConfig, folder)
        # Any size will do: positions are rotations.
        return FixedSizePreprocessor(processor, processor.size, config.patch_size)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(DINOv3ViTConfig, folder)
        model = load_tower(DINOv3ViTModel, config, folder, "", _plan(config), context)
        dims = {OutputKind.TOKENS: int(config.hidden_size), OutputKind.POOLED: int(config.hidden_size)}
        adapter = cls(model, preprocessor, dims, context.device)
        adapter.leading_rows = 1 + int(config.num_register_tokens)
        return adapter

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = DINOv3ViTConfig(
            hidden_size=48,
            intermediate_size=100,  # not divisible by 3
            num_hidden_layers=3,
            num_attention_heads=6,  # not divisible by 4; 8 values each, since rotation takes them by four
            patch_size=16,
            num_register_tokens=4,
        )
        write_random(DINOv3ViTModel, config, DINOv3Processor(size=(112, 112)), out, seed)
