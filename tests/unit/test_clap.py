"""CLAP's features: nothing is drawn at random, and both kinds of checkpoints give transformers' numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.clap import ClapAdapter, middles, write_tiny
from tests.harness.clips import sound
from tests.harness.sound_families import WholeSoundModel

RATE = 48_000
LENGTHS_S = (0.3, 1.0, 1.005, 1.02, 1.7, 3.3)
"""The window is one second. One of 1.005 s has no more frames than it; one of 1.02 s has thirds without a place."""


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= 1e-6 * want.abs().max())


def test_a_checkpoint_with_fusion_equals_transformers_alone_and_in_a_batch(
    tmp_path: Path, context: LoadContext
) -> None:
    write_tiny(tmp_path, seed=6, fusion=True)
    adapter, whole = ClapAdapter.load(tmp_path, context), WholeSoundModel("clap", tmp_path)
    sounds = [sound(seconds, RATE) for seconds in LENGTHS_S]
    features = [adapter.preprocessor.preprocess_audio(one) for one in sounds]
    with torch.inference_mode():
        together = adapter.forward(adapter.pack(features))
        alone = [adapter.forward(adapter.pack([item]))[0] for item in features]
    for one, item, *outs in zip(sounds, features, together, alone, strict=True):
        assert item.tensors["input_features"].shape == (1, 4, 101, 64)
        tokens, pooled = whole.encode(one)
        for out in outs:
            assert close(out.tokens, tokens), len(one.samples)
            assert pooled is not None
            assert out.pooled is not None
            assert close(out.pooled, pooled), len(one.samples)


@pytest.mark.parametrize("fusion", [True, False])
def test_features_do_not_depend_on_any_random_state(tmp_path: Path, fusion: bool) -> None:
    write_tiny(tmp_path, seed=6, fusion=fusion)
    preprocessor = ClapAdapter.load_preprocessor(tmp_path)
    for seconds in LENGTHS_S:
        one = sound(seconds, RATE)
        made = []
        for seed in (1, 2):
            np.random.seed(seed)
            made.append(preprocessor.preprocess_audio(one).tensors["input_features"])
        assert torch.equal(*made), seconds


@given(st.integers(1, 500))
def test_the_middles_are_within_the_thirds_that_transformers_draws_from(places: int) -> None:
    thirds = np.array_split(np.arange(places), 3)
    for middle, third in zip(middles(places), thirds, strict=True):
        assert middle in third if len(third) else middle == 0
        assert not len(third) or middle == third[len(third) // 2]


def test_an_extractor_of_the_other_kind_is_refused(tmp_path: Path, context: LoadContext) -> None:
    write_tiny(tmp_path, seed=6, fusion=False)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": "fusion"}))
    with pytest.raises(StartupError, match=r"cuts long sounds by fusion, but config\.json has enable_fusion False"):
        ClapAdapter.load(tmp_path, context)
