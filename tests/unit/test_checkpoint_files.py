"""What the files of a checkpoint say before any weight is read: types, pickles, retrievers of another library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Dinov2Model

from spmd_encoder.errors import StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.checkpoint import INDEX, SINGLE, check_folder, left_aside, resolve_checkpoint
from spmd_encoder.models.dinov2 import Dinov2Adapter
from spmd_encoder.models.loading import adapter_class, load_adapter


def test_a_pickled_checkpoint_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match=r"pytorch_model\.bin, a pickle.*safetensors"):
        check_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        check_folder(tmp_path)


def test_an_unsupported_type_is_refused_by_name_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    listed = ", ".join(sorted(t for entry in registry.FAMILIES for t in entry.model_types))
    why = "transformers has no model of this type with get_image_features, get_audio_features or get_video_features"
    with pytest.raises(StartupError, match=rf"'llama' is not supported here \({why}\); supported are: {listed}$"):
        resolve_checkpoint(str(tmp_path), None, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no config.json"),
        ("{", "cannot be read"),
        ("[" * 100_000, r"cannot be read \(it is nested more deeply"),
        ("[]", "not a JSON object"),
        ("{}", "names no model_type"),
    ],
)
def test_a_bad_config_is_one_sentence(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=words):
        resolve_checkpoint(str(tmp_path), None, tmp_path)


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("name", "depth"),
    [("config.json", 900), ("config.json", 10**5), ("preprocessor_config.json", 10**5), (INDEX, 900), (INDEX, 10**5)],
)
def test_files_that_are_nested_without_end_are_one_sentence(
    name: str, depth: int, tmp_path: Path, context: LoadContext
) -> None:
    """Where JSON itself is still read, what walks through it may come to its end."""
    adapter_class(registry.find("qwen2_5_vl")).tiny_checkpoint(tmp_path, seed=3)
    (tmp_path / SINGLE).rename(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    path = tmp_path / name
    path.write_text(f'{path.read_text().rstrip()[:-1]}, "b": {nested(depth)}}}')
    with pytest.raises(StartupError) as caught:
        load_adapter(tmp_path, context)
    assert str(tmp_path) in caught.value.message and "\n" not in caught.value.message


def test_a_single_file_goes_before_an_index_as_for_transformers(tmp_path: Path, context: LoadContext) -> None:
    cls = adapter_class(registry.find("dinov2"))
    cls.tiny_checkpoint(tmp_path, seed=3)
    cls.tiny_checkpoint(tmp_path / "other", seed=4)
    assert left_aside(tmp_path) == ""
    weights = load_file(tmp_path / "other" / SINGLE)
    save_file(weights, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "a.safetensors")}))
    assert left_aside(tmp_path) == INDEX
    theirs = Dinov2Model.from_pretrained(tmp_path).state_dict()
    adapter = load_adapter(tmp_path, context)
    assert isinstance(adapter, Dinov2Adapter)
    ours = adapter._model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not all(torch.equal(weights[name], ours[name]) for name in weights)


def test_a_missing_folder_says_what_can_be_given(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no such folder.*demo:dinov2-small"):
        resolve_checkpoint(str(tmp_path / "nothing"), None, tmp_path)


@pytest.mark.parametrize(("model_type", "architecture"), [("qwen2_vl", "ColQwen2"), ("qwen2_5_vl", "BiQwen2_5")])
def test_a_retriever_in_the_engine_s_format_is_not_taken_for_what_it_is_made_of(
    model_type: str, architecture: str, tmp_path: Path
) -> None:
    adapter_class(registry.find(model_type)).tiny_checkpoint(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    check_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    with pytest.raises(StartupError, match=f"the architecture {architecture} of colpali-engine.*ends in -hf"):
        check_folder(tmp_path)


def test_a_retriever_in_transformers_format_is_taken(tmp_path: Path) -> None:
    adapter_class(registry.find("colqwen2")).tiny_checkpoint(tmp_path, seed=3)
    assert "ColQwen2ForRetrieval" in (tmp_path / "config.json").read_text()
    check_folder(tmp_path)


def test_a_retriever_whose_adapter_names_it_is_not_taken_either(tmp_path: Path) -> None:
    """Merged into the weights, beside a `config.json` that names no architecture."""
    adapter_class(registry.find("qwen2_vl")).tiny_checkpoint(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    adapter = tmp_path / "adapter_config.json"
    for said in (
        "no JSON",
        "[]",
        "{}",
        '{"auto_mapping": null}',
        '{"auto_mapping": {"base_model_class": "Qwen2VLModel"}}',
    ):
        adapter.write_text(said)
        check_folder(tmp_path)
    adapter.write_text(json.dumps({"auto_mapping": {"base_model_class": "BiQwen2", "parent_library": "x"}}))
    with pytest.raises(StartupError, match=r"adapter_config\.json names the architecture BiQwen2 of colpali-engine"):
        check_folder(tmp_path)
