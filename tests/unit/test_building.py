"""What building a model finds in `config.json`, before any memory is taken for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperModel

from spmd_encoder.errors import StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.building import built
from spmd_encoder.models.loading import adapter_class, load_adapter


def test_more_weights_than_any_model_has_are_not_built(tmp_path: Path) -> None:
    """Whatever a class may call the number of its layers."""
    config = WhisperConfig(encoder_layers=10**9, d_model=6)
    with pytest.raises(StartupError, match=r"cannot build WhisperModel from config.json \(it has more than 131072 wei"):
        built(WhisperModel, config, tmp_path, torch.float32)
    assert len([*built(WhisperModel, WhisperConfig(d_model=6), tmp_path, torch.float32).parameters()]) < 1000


def test_what_is_computed_takes_no_more_memory_than_in_any_model(tmp_path: Path, context: LoadContext) -> None:
    adapter_class(registry.find("qwen2_5_omni")).tiny_checkpoint(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["thinker_config"]["audio_config"]["max_source_positions"] = 2**24
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"asks for model\S*positional_embedding of the shape \(16777216, 48\), wh"):
        load_adapter(tmp_path, context)


def test_a_config_that_no_model_can_be_built_from_is_told_at_once(tmp_path: Path, context: LoadContext) -> None:
    folder = tmp_path / "odd"
    adapter_class(registry.find("qwen2_5_vl")).tiny_checkpoint(folder, seed=3)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_heads"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"odd: transformers cannot build Qwen2_5_VL\w+ from config.json \(\w+"):
        load_adapter(folder, context)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_omni", "glm4v", "mistral3", "dinov3_vit", "colqwen2"])
def test_heads_that_do_not_divide_the_width_are_told_at_once(family: str, tmp_path: Path, context: LoadContext) -> None:
    adapter_class(registry.find(family)).tiny_checkpoint(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    part = next(part for part in _parts(config) if "hidden_size" in part or "embed_dim" in part)
    part["num_heads" if "num_heads" in part else "num_attention_heads"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    why = r"in \S+, whose \d+ values they do not divide|of \d+ values .* which is not their product"
    with pytest.raises(StartupError, match=f"config.json asks for 5 heads ({why})"):
        load_adapter(tmp_path, context)


def test_what_the_code_of_a_part_finds_wrong_names_its_class(tmp_path: Path, context: LoadContext) -> None:
    """Where a part is first run: as its share of the weights is proven."""
    adapter_class(registry.find("qwen2_5_vl")).tiny_checkpoint(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_heads"] = 64  # of one value each, and rotation takes two
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        StartupError, match=r"the processor's file cannot be used \(RuntimeError: .*, in PackedAttention\)"
    ):
        load_adapter(tmp_path, context)


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings of the tower for pictures, however deep they lie, or else all of them."""
    inner = [config.get(name) for name in ("thinker_config", "vlm_config", "vision_config")]
    for one in inner:
        if isinstance(one, dict):
            yield from _parts(one)
    yield config
