"""Weights in the files that the model has no place for: which are told, and which are of no harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_encoder.errors import StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.checkpoint import SINGLE, check_folder
from spmd_encoder.models.leftovers import doubles
from spmd_encoder.models.loading import adapter_class, load_adapter

TOWERS = {
    "qwen2_5_vl": "visual.blocks.",
    "clip": "vision_model.encoder.layers.",
    "llava": "vision_tower.encoder.layers.",
    "idefics3": "model.vision_model.encoder.layers.",
    "qwen3_vl": "model.visual.blocks.",
    "whisper": "encoder.layers.",
    "dinov2": "encoder.layer.",
    "siglip": "vision_model.encoder.layers.",
    "colqwen2": "vlm.language_model.layers.",
}
"""A stack of layers in the files of each of some families."""

Weights = dict[str, Tensor]


def write(family: str, folder: Path, change: Callable[[Weights], Weights]) -> Weights:
    """The family's tiny checkpoint, its weights changed; returns what they were."""
    adapter_class(registry.find(family)).tiny_checkpoint(folder, seed=3)
    found = load_file(folder / SINGLE)
    save_file({key: weight.contiguous() for key, weight in change(found).items()}, folder / SINGLE)
    return found


def configure(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def further_layer(found: Weights, layers: str) -> Weights:
    """A copy of the second layer of a stack as its eighth."""
    return {
        key.replace(f"{layers}1.", f"{layers}7."): weight.clone()
        for key, weight in found.items()
        if key.startswith(f"{layers}1.")
    }


@pytest.mark.parametrize("family", TOWERS)
def test_layers_that_config_does_not_ask_for_are_told(family: str, tmp_path: Path, context: LoadContext) -> None:
    found = write(family, tmp_path, lambda found: found | further_layer(found, TOWERS[family]))
    count = len(further_layer(found, TOWERS[family]))
    assert count
    first = TOWERS[family].replace(".", r"\.")
    with pytest.raises(StartupError, match=rf"hold {count} weights .*first {first}7\..*does not belong to these"):
        load_adapter(tmp_path, context)


def test_a_config_of_fewer_layers_is_told(tmp_path: Path, context: LoadContext) -> None:
    write("qwen2_5_vl", tmp_path, lambda found: found)
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    configure(tmp_path, vision_config={**vision, "depth": 1})
    with pytest.raises(StartupError, match=r"first visual\.blocks\.1\.attn\.proj\.bias: config\.json does not belong"):
        load_adapter(tmp_path, context)


def test_half_of_a_model_alone_has_its_layers_checked_too(tmp_path: Path, context: LoadContext) -> None:
    """In files with the prefix of the whole model, which the half's own names do not have."""
    write("clip", tmp_path, lambda found: {k: w for k, w in found.items() if k.startswith("vision_model.")})
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps({**vision, "model_type": "clip_vision_model"}))
    load_adapter(tmp_path, context)
    configure(tmp_path, num_hidden_layers=1)
    with pytest.raises(StartupError, match=r"first vision_model\.encoder\.layers\.1\."):
        load_adapter(tmp_path, context)


@pytest.mark.parametrize(
    "stray",
    [
        "model.visual.blocks.0.attn.qkv.lora_A.weight",  # an adapter that was not merged
        "model.visual.blocks.0.attn.q_norm.weight",
        "model.visual.patch_embed.proj.scale",
        "model.visual.merger.linear_fc3.weight",
        "model.visual.deepstack_merger_list.5.norm.weight",
    ],
)
def test_a_weight_that_would_be_in_a_module_is_told(stray: str, tmp_path: Path, context: LoadContext) -> None:
    write("qwen3_vl", tmp_path, lambda found: found | {stray: torch.zeros(4)})
    with pytest.raises(StartupError, match=f"hold 1 weights of the encoder .*first {stray}: "):
        load_adapter(tmp_path, context)


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen3_vl", "model.visual.rotary_pos_emb.inv_freq"),
        ("qwen3_vl", "model.visual.blocks.0.attn.rotary_emb.inv_freq"),  # as old releases had it
        ("qwen3_vl", "model.visual.head.weight"),
        ("qwen3_vl", "model.language_model.layers.9.mlp.up_proj.weight"),
        ("qwen3_5", "mtp.layers.0.mlp.up_proj.weight"),
        ("clip", "vision_model.embeddings.position_ids"),
        ("clip", "text_model.encoder.layers.9.mlp.fc1.weight"),
        ("llava", "vision_tower.embeddings.position_ids"),
        ("dinov2", "embeddings.patch_embeddings.num_batches_tracked"),
        ("dinov2", "classifier.weight"),
        ("dinov2", "dinov2_teacher.encoder.layer.0.norm1.weight"),
        ("whisper", "model.decoder.layers.9.fc1.weight"),
        ("whisper", "proj_out.weight"),
        ("colqwen2", "vlm.lm_head.weight"),
        ("colmodernvbert", "vlm.vision_model.head.probe"),
    ],
)
def test_what_is_of_no_use_and_no_harm_is_left_alone(
    family: str, extra: str, tmp_path: Path, context: LoadContext
) -> None:
    write(family, tmp_path, lambda found: found | {extra: torch.zeros(4)})
    assert load_adapter(tmp_path, context).tower_bytes > 0


def test_what_transformers_expects_to_find_too_much_is_left_alone(
    tmp_path: Path, context: LoadContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls: Any = adapter_class(registry.find("qwen3_vl"))
    extra = "model.visual.blocks.0.attn.packing.weight"
    write("qwen3_vl", tmp_path, lambda found: found | {extra: torch.zeros(4)})
    with pytest.raises(StartupError, match="packing"):
        load_adapter(tmp_path, context)
    monkeypatch.setattr(cls.model_class, "_keys_to_ignore_on_load_unexpected", [r"attn\.packing"])
    assert load_adapter(tmp_path, context).tower_bytes > 0


def test_a_missing_weight_is_not_laid_to_layers_that_are_not_built(tmp_path: Path, context: LoadContext) -> None:
    lost = "visual.blocks.2.attn.qkv.weight"
    write("qwen2_5_vl", tmp_path, lambda found: {key: w for key, w in found.items() if not key.endswith(lost)})
    with pytest.raises(StartupError, match=rf"lacks 1 weights of the encoder, first model\.{lost}$"):
        load_adapter(tmp_path, context)


def test_a_weight_by_another_name_is_told_with_the_missing_one(tmp_path: Path, context: LoadContext) -> None:
    write("dinov2", tmp_path, lambda found: {k.replace("layer.1.norm1", "layer.1.norm_1"): w for k, w in found.items()})
    with pytest.raises(StartupError, match=r"lacks 2 weights .*has 2 by names .*first encoder\.layer\.1\.norm_1\.bias"):
        load_adapter(tmp_path, context)


def test_two_names_for_one_weight_are_told_unless_they_are_the_same(tmp_path: Path, context: LoadContext) -> None:
    def twice(found: Weights) -> Weights:
        return found | {f"model.{key}": w.clone() for key, w in found.items() if key.startswith("visual.")}

    found = write("qwen2_5_vl", tmp_path, twice)
    assert load_adapter(tmp_path, context).tower_bytes > 0
    key = "visual.blocks.1.norm1.weight"
    save_file(found | {f"model.{key}": found[key] + 1}, tmp_path / SINGLE)
    with pytest.raises(StartupError, match=rf"hold the weight model\.{key} twice, as {key} and as model\.{key}, with"):
        load_adapter(tmp_path, context)


def test_parts_of_a_joined_weight_are_no_doubles() -> None:
    parts = {f"visual.{name}.weight": torch.full((2,), value) for name, value in (("q", 1.0), ("k", 2.0), ("v", 3.0))}
    names = dict.fromkeys([*parts, "model.visual.k.weight"], "model.visual.qkv.weight")
    assert not [*doubles(Path("here"), parts, {key: names[key] for key in parts}, parts)]
    same = parts | {"model.visual.k.weight": torch.full((2,), 2.0)}
    assert [*doubles(Path("here"), same, names, same)] == ["model.visual.k.weight"]
    other = parts | {"model.visual.k.weight": torch.full((2,), 1.0)}
    with pytest.raises(StartupError, match=r"as visual\.k\.weight and as model\.visual\.k\.weight, with other values"):
        [*doubles(Path("here"), other, names, other)]


@pytest.mark.parametrize("architectures", [None, ["ModernVBertModel"]])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_retriever_is_told_by_its_projection(
    architectures: list[str] | None, prefix: str, tmp_path: Path, context: LoadContext
) -> None:
    """colpali-engine's own ColModernVBert: the configuration of what it is made of, and a projection."""

    def renamed(found: Weights) -> Weights:
        names = {"vlm.": prefix, "embedding_proj_layer.": "custom_text_proj."}
        return {new + k.removeprefix(old): w for k, w in found.items() for old, new in names.items() if old in k}

    write("colmodernvbert", tmp_path, renamed)
    inner = json.loads((tmp_path / "config.json").read_text())["vlm_config"]
    (tmp_path / "config.json").write_text(json.dumps({**inner, "architectures": architectures}))
    check_folder(tmp_path)
    with pytest.raises(StartupError, match=r"hold custom_text_proj\.bias, the projection .*ModernVBertModel.*in -hf"):
        load_adapter(tmp_path, context)


@pytest.mark.parametrize("name", ["ColModernVBert", "BiModernVBert", "ColFlor", "ColSmol", "ColLlama", "ColQwen3"])
def test_a_retriever_is_told_by_its_name(name: str, tmp_path: Path) -> None:
    write("qwen2_5_vl", tmp_path, lambda found: found)
    configure(tmp_path, architectures=[name])
    with pytest.raises(StartupError, match=f"the architecture {name} of colpali-engine"):
        check_folder(tmp_path)
