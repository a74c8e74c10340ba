"""Checkpoints of families of sounds as they are found: by any names of weights, with processors of any age."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import Sound
from spmd_encoder.models import checkpoint
from spmd_encoder.models.audio import check_length
from spmd_encoder.models.audio_families import AUDIO_FAMILIES
from spmd_encoder.models.base import LoadContext, TowerOutput
from spmd_encoder.models.families import FamilyEntry
from spmd_encoder.models.loading import adapter_class, load_adapter, load_preprocessor
from tests.harness.samples import features_of, forwards

PREPROCESSOR = "preprocessor_config.json"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for entry in AUDIO_FAMILIES:
        adapter_class(entry).tiny_checkpoint(root / entry.family, seed=0)
    return {entry.family: root / entry.family for entry in AUDIO_FAMILIES}


def encode(folder: Path, context: LoadContext) -> list[TowerOutput]:
    """One item of each modality."""
    adapter = load_adapter(folder, context)
    return forwards(adapter, [features_of(adapter.preprocessor, one)[0] for one in adapter.modalities])


def same(some: list[TowerOutput], others: list[TowerOutput]) -> bool:
    pairs = [(one.tokens, other.tokens) for one, other in zip(some, others, strict=True)]
    return all(a.shape == b.shape and bool((a - b).abs().max() <= 1e-6 * b.abs().max()) for a, b in pairs)


def edit(path: Path, **edits: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | edits))


@pytest.mark.parametrize("entry", AUDIO_FAMILIES, ids=lambda entry: entry.family)
def test_every_name_of_the_towers_loads(
    entry: FamilyEntry, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[entry.family], tmp_path / "copy")
    weights = load_file(folder / checkpoint.SINGLE)
    towers = {key.rstrip(".").rpartition(".")[2] for key in entry.tower_keys}
    own = {key[key.index(f"{t}.") :]: value for key, value in weights.items() for t in towers if f"{t}." in key}
    want = encode(tiny[entry.family], context)
    for prefix in {key.rstrip(".").rpartition(".")[0] for key in entry.tower_keys}:
        save_file({f"{prefix}.{key}".lstrip("."): value for key, value in own.items()}, folder / checkpoint.SINGLE)
        assert same(encode(folder, context), want), prefix


@pytest.mark.parametrize("entry", AUDIO_FAMILIES, ids=lambda entry: entry.family)
def test_one_file_of_all_processors_is_read(
    entry: FamilyEntry, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    """As newer releases of transformers save them."""
    folder = shutil.copytree(tiny[entry.family], tmp_path / "copy")
    settings = json.loads((folder / PREPROCESSOR).read_text())
    (folder / PREPROCESSOR).unlink()
    whole = {"feature_extractor": settings, "image_processor": settings, "processor_class": "SomeProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert same(encode(folder, context), encode(tiny[entry.family], context))


@pytest.mark.parametrize(
    ("family", "edits", "words"),
    [
        ("qwen2_5_omni", {"feature_size": 80}, "makes 80 mel bins, but config.json asks for 16"),
        ("voxtral", {"feature_size": 128}, "makes 128 mel bins"),
        ("voxtral", {"chunk_length": 30}, "windows of 3000 frames, but config.json asks for 200"),
        ("qwen3_asr", {"n_window": 20}, "chunks of 40 frames, but config.json asks for 100"),
    ],
)
def test_an_extractor_that_does_not_fit_the_tower_is_refused(
    family: str, edits: dict[str, int], words: str, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    edit(folder / PREPROCESSOR, **edits)
    with pytest.raises(StartupError, match=words):
        load_adapter(folder, context)


@pytest.mark.parametrize("family", ["audioflamingo3", "musicflamingo", "glmasr"])
def test_the_whole_processor_says_how_long_a_sound_may_be(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    (folder / "processor_config.json").write_text(json.dumps({"max_audio_len": 4}))
    preprocessor = load_preprocessor(folder)
    rate = preprocessor.sampling_rate
    preprocessor.preprocess_audio(Sound(samples=np.zeros(4 * rate, np.float32), rate=rate))
    with pytest.raises(EncoderError, match="takes at most 4 s") as caught:
        preprocessor.preprocess_audio(Sound(samples=np.zeros(4 * rate + 1, np.float32), rate=rate))
    assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    ("samples", "words"),
    [(480_001, "lasts 30.0001 s"), (480_016, "lasts 30.001 s"), (488_000, "lasts 30.50 s"), (976_000, "lasts 61.00 s")],
)
def test_a_sound_that_is_a_little_too_long_does_not_seem_to_fit(samples: int, words: str) -> None:
    with pytest.raises(EncoderError, match=words) as caught:
        check_length(Sound(samples=np.zeros(samples, np.float32), rate=16_000), 30.0)
    assert "takes at most 30 s" in caught.value.message
