"""A loaded tower takes its own bytes of memory and no more, however large the language half beside it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.harness import large_checkpoint

models: Any = transformers
MIB = 2**20
VOCABULARY = 4_000_000

CHILD = """
import json, sys
from pathlib import Path
from spmd_encoder.models import registry
from spmd_encoder.models.checkpoint import read_model_type

folder = Path(sys.argv[1])
registry.preload(read_model_type(folder))
import torch, torch.distributed as dist
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.loading import load_adapter

def resident():
    # Bytes in memory (of the checkpoint's file, anonymous). Pages of libraries do not count: first calls touch them.
    checkpoint, anonymous, mine = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == "Rss":
            checkpoint += int(rest.split()[0]) * 1024 * mine
        elif key == "Anonymous":
            anonymous += int(rest.split()[0]) * 1024
        elif "-" in line.split()[0]:
            mine = line.endswith("model.safetensors")
    return checkpoint, anonymous

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
context = LoadContext(dtype=torch.float32, device=torch.device("cpu"), group=dist.group.WORLD)
_, before = resident()
adapter = load_adapter(folder, context)
# Weights are views of the mapped file, whose pages count once they are read.
total = sum(float(p.sum()) for p in adapter._model.parameters() if not p.is_meta)
assert total == total
mapped, after = resident()
print(json.dumps({"tower": adapter.tower_bytes, "mapped": mapped, "anonymous": after - before}))
"""


def _qwen3_vl() -> tuple[Any, Any, Any, tuple[str, ...]]:
    vision = {"depth": 4, "hidden_size": 256, "intermediate_size": 8192, "num_heads": 4, "out_hidden_size": 128}
    vision["num_position_embeddings"] = 64
    text = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = models.Qwen3VLConfig(vision_config={**vision, "deepstack_visual_indexes": [1, 2]}, text_config=text)
    processor = models.Qwen2VLImageProcessorPil(patch_size=16)
    return models.Qwen3VLForConditionalGeneration, config, processor, ("model.visual.",)


def _siglip2() -> tuple[Any, Any, Any, tuple[str, ...]]:
    vision = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = models.Siglip2Config(vision_config=vision, text_config={**text, "num_attention_heads": 4})
    return models.Siglip2Model, config, models.Siglip2ImageProcessorPil(), ("vision_model.",)


def _clip() -> tuple[Any, Any, Any, tuple[str, ...]]:
    vision = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = models.CLIPConfig(vision_config=vision, text_config={**text, "num_attention_heads": 4})
    return models.CLIPModel, config, models.CLIPImageProcessorPil(), ("vision_model.", "visual_projection.")


@pytest.mark.parametrize("family", [_qwen3_vl, _siglip2, _clip], ids=lambda make: make.__name__.strip("_"))
def test_the_language_half_takes_no_memory(family: Any, tmp_path: Path) -> None:
    tower, rest = large_checkpoint.write(*family()[:3], tmp_path, family()[3])
    assert tower > 60 * MIB
    assert rest > 30 * tower
    env = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(family.__name__, {key: round(value / MIB, 1) for key, value in found.items()}, round(rest / MIB))
    assert found["tower"] == tower
    assert tower * 0.95 <= found["mapped"] <= tower * 1.1, found
    assert found["anonymous"] < 24 * MIB, found
