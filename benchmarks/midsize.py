"""Writes a Qwen2.5-VL with random weights whose tower is of middle size: depth 8, width 320, 8 MiB and more.

    python -m benchmarks.midsize FOLDER

On the tiny demo model HTTP alone takes longer than the tower, so that a ratio to it says little.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_encoder.models.tiny import write_random


def write(out: Path) -> None:
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 8,
            "hidden_size": 320,
            "intermediate_size": 864,
            "num_heads": 8,
            "out_hidden_size": 512,
            "window_size": 112,
            "fullatt_block_indexes": [3, 7],
        },
        text_config={
            "vocab_size": 64,
            "hidden_size": 512,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
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
    write_random(Qwen2_5_VLForConditionalGeneration, config, Qwen2VLImageProcessorPil(), out, seed=0)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
