"""Writes a checkpoint with random weights: `python -m benchmarks.make_checkpoint NAME FOLDER`. Imports transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from benchmarks import midsize, towers
from spmd_encoder.models.tiny import write_random


def _siglip(out: Path, side: int, config: SiglipVisionConfig) -> None:
    processor = SiglipImageProcessorPil(size={"height": side, "width": side})
    write_random(SiglipVisionModel, config, processor, out, seed=0)


def siglip_base(out: Path) -> None:
    """SigLIP-base/16 at 224: 93 million parameters."""
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    _siglip(out, 224, SiglipVisionConfig(image_size=224, patch_size=16, **sizes))


def siglip_tiny(out: Path) -> None:
    """Next to nothing, whatever a picture's size: what is left is the way to it."""
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    _siglip(out, 96, SiglipVisionConfig(image_size=96, patch_size=16, **sizes))


WRITERS = {
    "mid": midsize.write,
    "siglip-base": siglip_base,
    "siglip-tiny": siglip_tiny,
    "qwen-1280": towers.qwen2_5_vl,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
