"""The towers that `benchmarks.tower` measures: real proportions, random weights, fewer layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import (
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from benchmarks import midsize
from spmd_encoder.models.qwen_vl import tiny_whole
from spmd_encoder.models.tiny import write_random


@dataclass(frozen=True)
class Geometry:
    """One tower: its side of a square picture, its batch sizes, and pictures per measurement at the least."""

    write: Callable[[Path], None]
    side: int
    batches: tuple[int, ...]
    pictures: int


def qwen2_5_vl(out: Path) -> None:
    vision = {
        "depth": 8,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
    }
    config = Qwen2_5_VLConfig(vision_config=vision, **tiny_whole(2048))
    write_random(Qwen2_5_VLForConditionalGeneration, config, Qwen2VLImageProcessorPil(), out, seed=0)


def _qwen3_vl(out: Path) -> None:
    vision = {"depth": 2, "out_hidden_size": 2048, "deepstack_visual_indexes": [1]}
    whole = tiny_whole(2048)
    config = Qwen3VLConfig(**whole | {"vision_config": vision, "text_config": whole["text_config"] | {"head_dim": 512}})
    write_random(Qwen3VLForConditionalGeneration, config, Qwen2VLImageProcessorPil(patch_size=16), out, seed=0)


def _dinov2(out: Path) -> None:
    config = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14)
    processor = BitImageProcessorPil(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224})
    write_random(Dinov2Model, config, processor, out, seed=0)


GEOMETRIES = {
    "qwen2.5-vl-midsize": Geometry(midsize.write, 224, (1, 4, 8), 4),
    "qwen2.5-vl-1280": Geometry(qwen2_5_vl, 224, (1, 4), 1),
    "qwen3-vl-1152": Geometry(_qwen3_vl, 256, (1, 4), 1),
    "dinov2-small": Geometry(_dinov2, 224, (1, 4), 4),
}
