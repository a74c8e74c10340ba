"""A checkpoint of real proportions that takes disk for its tower only: the rest of its one file is a hole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    processor: Any,
    out: Path,
    tower: tuple[str, ...],
    dtype: torch.dtype = torch.float32,
) -> tuple[int, int]:
    """Save `cls` into `out`: random values for weights whose names start with one of `tower`, zeros for the others.

    Returns the bytes of (the tower, all the rest). The format of the file is safetensors': eight bytes with the
    header's length, little endian, the header in JSON, the tensors.
    """
    with torch.device("meta"):
        build: Any = cls
        weights: dict[str, Tensor] = build(config).state_dict()
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        begin, end = end, end + tensor.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    in_tower = 0
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name in (name for name in weights if name.startswith(tower)):
            begin, stop = header[name]["data_offsets"]
            values = torch.empty(weights[name].shape, dtype=dtype).normal_(std=0.02, generator=generator)
            file.seek(8 + len(text) + begin)
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
            in_tower += stop - begin
    config.save_pretrained(out)
    processor.save_pretrained(out)
    return in_tower, end - in_tower
