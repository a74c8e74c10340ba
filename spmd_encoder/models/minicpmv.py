"""MiniCPM-V 4.6 and 4.7: the whole picture scaled down, then slices of it, all in their own shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6Config
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6ForConditionalGeneration
from transformers.models.minicpmv4_7.configuration_minicpmv4_7 import MiniCPMV4_7Config
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7ForConditionalGeneration

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.tiling import Tiling
from spmd_encoder.errors import StartupError
from spmd_encoder.models.attention import SegmentAttention
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import FEED_FORWARD
from spmd_encoder.models.vision_language import TINY_LLAMA, VISION, VisionLanguageAdapter
from spmd_encoder.models.weights import from_folder


class SlicePreprocessor(Preprocessor):
    """One picture as `pixel_values` `[1, 3, patch, patches * patch]`, `target_sizes` `[slices, 2]` in patches.

    The first slice is the whole picture. `details` has the `grids` of the others, (rows, columns) or zeros, and
    `target_sizes` (height, width) of all, one after the other, as transformers' processor gives them.
    """

    def __init__(self, processor: Any, rows_per_patch: float) -> None:
        self.processor = processor
        self._rows_per_patch = rows_per_patch
        most = processor.max_slice_nums if processor.slice_mode else 1
        unit = processor.patch_size * (2 if processor.downsample_mode == "4x" else 4)  # as its `find_best_resize`
        self._tiling = Tiling(rule="slices", side=processor.scale_resolution, most=most, unit=unit)

    def cost_table(self) -> CostTable:
        patch = self.processor.patch_size
        return CostTable(patch=patch, fixed_tokens=(self._tiling.side // patch) ** 2, tiling=self._tiling)

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self.processor, image)
        sizes = made["target_sizes"]
        patches = int(sizes.prod(-1).sum())
        rows, columns = self._tiling.grid(*image.size) if len(sizes) > 1 else (0, 0)
        return Features(
            tensors={"pixel_values": made["pixel_values"], "target_sizes": sizes},
            num_tokens=round(patches * self._rows_per_patch),
            cost=patches,
            details={"grids": [rows, columns], "target_sizes": sizes.flatten().tolist()},
        )


class SliceAttention(SegmentAttention):
    """Takes the place of transformers' own after it was cut. The merger's has a window of four patches as a segment."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention, closing="out_proj")

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`[1, rows, width]` to the same; the second is where transformers' has weights of attention."""
        return self.attend(hidden_states, cu_seqlens, None), None


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over two slices of unequal size."""
    ends = torch.tensor([0, len(hidden) // 3, len(hidden)], dtype=torch.int32, device=hidden.device)
    out: Tensor = attention(hidden[None], cu_seqlens=ends, max_seqlen=None)[0]
    return out[0]


def _run_merger(merger: Any, hidden: Tensor) -> Tensor:
    """What follows the attention of the merger between the layers, which is compared by itself."""
    out: Tensor = merger.linear_2(merger.act(merger.linear_1(merger.pre_norm(hidden))))
    return out


def _attention(path: str) -> Split:
    return Split(
        path=path,
        columns=("q_proj", "k_proj", "v_proj"),
        row="out_proj",
        heads="num_heads",
        run=_run_attention,
        faster=SliceAttention,
    )


class MiniCPMV46Adapter(VisionLanguageAdapter):
    """`tokens` `[rows, dim]`: those of the whole picture, then those of its slices, row by row of the grid."""

    model_types: ClassVar[tuple[str, ...]] = ("minicpmv4_6",)
    family = "minicpmv4_6"
    model_class: ClassVar[type[PreTrainedModel]] = MiniCPMV4_6ForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = MiniCPMV4_6Config
    kept = (VISION, "model.merger")

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        inner = f"{VISION}.vit_merger"
        return TowerPlan(
            blocks=f"{VISION}.encoder.layers",
            num_blocks=config.vision_config.num_hidden_layers,
            in_block=(_attention("self_attn"), FEED_FORWARD),
            once=(
                Split(path=inner, columns=("linear_1",), row="linear_2", run=_run_merger),
                _attention(f"{inner}.self_attn"),
                *(
                    Split(path=f"model.merger.mlp.{level}", columns=("linear_1",), row="linear_2")
                    for level in range(config.merger_times)
                ),
            ),
        )

    @classmethod
    def load_preprocessor(cls, folder: Path) -> SlicePreprocessor:
        processor: Any = from_folder(MiniCPMV4_6ImageProcessorPil, folder)
        config: Any = from_folder(cls.config_class, folder)
        made, taken = (processor.patch_size, processor.downsample_mode), (config.patch_size, config.downsample_mode)
        if made != taken:
            raise StartupError(
                f"{folder}: preprocessor_config.json has (patch_size, downsample_mode) {made}, "
                f"but config.json asks for {taken}"
            )
        high, wide = config.merge_kernel_size
        inner = 1 if config.downsample_mode == "4x" else 4
        return SlicePreprocessor(processor, 1 / (inner * (high * wide) ** config.merger_times))

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[1, 3, patch, all patches * patch]` float32; `target_sizes` `[all slices, 2]` in patches;
        `tiles` `[items]` int64, how many slices each item has."""
        sizes = [item.tensors["target_sizes"] for item in items]
        return {
            "pixel_values": torch.cat([item.tensors["pixel_values"] for item in items], dim=-1),
            "target_sizes": torch.cat(sizes),
            "tiles": torch.tensor([len(item) for item in sizes]),
        }

    def rows(self, inputs: dict[str, Tensor], tiles: list[int]) -> list[Tensor]:
        slices = iter(super().rows(inputs, tiles))
        return [torch.cat([next(slices) for _ in range(count)]) for count in tiles]

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        make: Any = cls.config_class
        config = make(
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14},
            text_config=TINY_LLAMA,
            image_token_id=60,
            video_token_id=61,
            insert_layer_id=1,
        )
        write_random(cls.model_class, config, MiniCPMV4_6ImageProcessorPil(scale_resolution=224), out, seed)


class MiniCPMV47Adapter(MiniCPMV46Adapter):
    """As 4.6's, whose tower it has."""

    model_types = ("minicpmv4_7",)
    family = "minicpmv4_7"
    model_class = MiniCPMV4_7ForConditionalGeneration
    config_class = MiniCPMV4_7Config
