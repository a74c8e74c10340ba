"""Families with many vectors per picture: their prompts, hub names of weights, and what does not fit together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from spmd_encoder.errors import StartupError
from spmd_encoder.models import checkpoint, registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from spmd_encoder.models.retrieval_families import RETRIEVAL_FAMILIES
from tests.harness.families import WholeModel
from tests.harness.samples import features_of, forwards, pictures


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for entry in RETRIEVAL_FAMILIES:
        adapter_class(entry).tiny_checkpoint(root / entry.family, seed=0)
    return {entry.family: root / entry.family for entry in RETRIEVAL_FAMILIES}


def vectors(folder: Path, context: LoadContext) -> list[Tensor]:
    adapter = load_adapter(folder, context)
    (modality,) = adapter.modalities
    return [out.tokens for out in forwards(adapter, features_of(adapter.preprocessor, modality))]


@pytest.mark.parametrize("family", [entry.family for entry in RETRIEVAL_FAMILIES])
def test_a_batch_is_what_transformers_makes_of_one_that_it_pads(
    family: str, tiny: dict[str, Path], context: LoadContext
) -> None:
    whole = WholeModel(family, tiny[family])
    inputs = whole.inputs(pictures())
    with torch.inference_mode():
        padded = whole.model(**inputs).embeddings
    for got, rows, mask in zip(vectors(tiny[family], context), padded, inputs["attention_mask"], strict=True):
        torch.testing.assert_close(got, rows[mask.bool()], rtol=0, atol=1e-5)
        torch.testing.assert_close(got.norm(dim=-1), torch.ones(len(got)))


@pytest.mark.parametrize("family", [entry.family for entry in RETRIEVAL_FAMILIES])
def test_the_details_say_which_rows_are_the_pictures(family: str, tiny: dict[str, Path], context: LoadContext) -> None:
    adapter = load_adapter(tiny[family], context)
    config: Any = AutoConfig.from_pretrained(tiny[family])
    token = config.vlm_config.image_token_id
    for features in features_of(adapter.preprocessor, adapter.modalities[0]):
        bounds: Any = features.details["image_rows"]
        own = torch.zeros(features.num_tokens, dtype=torch.bool)
        for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
            own[begin:end] = True
        assert torch.equal(own, features.tensors["input_ids"] == token)
        assert 0 < int(own.sum()) < features.num_tokens


@pytest.mark.parametrize(
    ("family", "own", "found"),
    [
        ("colpali", "vlm.vision_tower.", "vlm.vision_tower.vision_model."),
        ("colqwen2", "vlm.", "vlm.model."),
    ],
)
def test_weights_load_by_their_names_on_the_hub(
    family: str, own: str, found: str, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    weights = load_file(folder / checkpoint.SINGLE)
    renamed = {f"{found}{key.removeprefix(own)}" if key.startswith(own) else key: w for key, w in weights.items()}
    assert renamed.keys() != weights.keys()
    # The whole language model's head, which has no part in it.
    save_file(renamed | {"vlm.lm_head.weight": torch.zeros(3)}, folder / checkpoint.SINGLE)
    for one, other in zip(vectors(folder, context), vectors(tiny[family], context), strict=True):
        torch.testing.assert_close(one, other)


def edit(folder: Path, name: str, *path: str, value: Any) -> None:
    said = json.loads((folder / name).read_text())
    *parents, last = path
    part = said
    for key in parents:
        part = part[key]
    part[last] = value
    (folder / name).write_text(json.dumps(said))


VLM = ("config.json", "vlm_config")


@pytest.mark.parametrize(
    ("family", "path", "value", "words"),
    [
        ("colpali", (*VLM, "text_config", "model_type"), "gemma2", "a language model of type 'gemma2'"),
        ("colpali", (*VLM, "text_config", "vocab_size"), 8, "the tokenizer's tokens are not those"),
        ("colqwen2", (*VLM, "image_token_id"), 63, "the tokenizer's tokens are not those"),
        ("colpali", ("processor_config.json", "image_processor", "image_seq_length"), 49, "49 places .* asks for 64"),
        ("colqwen2", (*VLM, "model_type"), "qwen2_5_vl", "is supported here with Qwen2-VL"),
        (
            "colqwen2",
            (*VLM, "text_config", "layer_types"),
            ["full_attention", "sliding_attention"],
            "without sliding windows",
        ),
        ("colqwen2", ("processor_config.json", "image_processor", "patch_size"), 16, r"\(16, 2, 2\), but config.json"),
        ("colmodernvbert", ("processor_config.json", "image_seq_len"), 64, "64 places for a tile, but .* asks for 16"),
        ("colmodernvbert", (*VLM, "vision_config", "image_size"), 56, "tiles of 112 pixels a side, but .* asks for 56"),
    ],
)
def test_what_does_not_fit_is_refused(
    family: str,
    path: tuple[str, ...],
    value: Any,
    words: str,
    tiny: dict[str, Path],
    tmp_path: Path,
    context: LoadContext,
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    edit(folder, *path, value=value)
    with pytest.raises(StartupError, match=words):
        load_adapter(folder, context)


@pytest.mark.parametrize("family", [entry.family for entry in RETRIEVAL_FAMILIES])
def test_a_missing_tokenizer_is_named(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match="Processor cannot be read from this checkpoint"):
        adapter_class(registry.find(family)).load_preprocessor(folder)
