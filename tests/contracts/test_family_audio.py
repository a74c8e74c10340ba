"""What every family of sounds promises, checked for each line of the registry against transformers' whole model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_encoder.api.types import MediaItem, Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Sound
from spmd_encoder.models import registry
from spmd_encoder.models.base import Features, LoadContext, TowerOutput
from spmd_encoder.models.loading import adapter_class, load_adapter
from tests.harness.clips import sound
from tests.harness.sound_families import LEVELS, WholeSoundModel

TOLERANCE = 1e-6
FAMILIES = [entry for entry in registry.FAMILIES if Modality.AUDIO in adapter_class(entry).modalities]
LENGTHS_S = (0.5, 0.07, 1.0, 1.73, 0.271, 1.999)


class Case:
    def __init__(self, entry: registry.FamilyEntry, folder: Path, context: LoadContext) -> None:
        adapter_class(entry).tiny_checkpoint(folder, seed=3)
        self.folder = folder
        self.context = context
        self.adapter = load_adapter(folder, context)
        self.reference = WholeSoundModel(entry.family, folder).encode
        self.rate = self.adapter.preprocessor.sampling_rate

    def sounds(self) -> list[Sound]:
        return [sound(seconds, self.rate) for seconds in LENGTHS_S]

    def prepare(self, one: Sound) -> Features:
        return self.adapter.preprocessor.preprocess_audio(one)

    def run(self, items: list[Features]) -> list[TowerOutput]:
        with torch.inference_mode():
            return self.adapter.forward(self.adapter.pack(items))

    def batches(self, features: list[Features], order: tuple[int, ...]) -> list[list[int]]:
        by_key: dict[Any, list[int]] = {}
        for i in order:
            by_key.setdefault(self.adapter.batch_key(features[i]), []).append(i)
        return list(by_key.values())


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda entry: entry.family)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    entry: registry.FamilyEntry = request.param
    return Case(entry, tmp_path_factory.mktemp(entry.family), context)


def close(got: Tensor | None, want: Tensor | None, tolerance: float = TOLERANCE) -> bool:
    if got is None or want is None:
        return got is want
    return got.shape == want.shape and bool((got.float() - want).abs().max() <= tolerance * want.abs().max())


def test_a_sound_equals_transformers_and_keeps_its_promises(case: Case) -> None:
    for one in case.sounds():
        features = case.prepare(one)
        (out,) = case.run([features])
        tokens, pooled = case.reference(one)
        assert close(out.tokens, tokens), len(one.samples)
        assert close(out.pooled, pooled), len(one.samples)
        width = case.adapter.embedding_dims[OutputKind.TOKENS] // LEVELS.get(case.adapter.family, 1)
        assert out.tokens.shape == (features.num_tokens, width)
        assert (out.pooled is not None) == (OutputKind.POOLED in case.adapter.outputs)
        assert features.modality is Modality.AUDIO
        assert bool(torch.isfinite(out.tokens).all())


def test_a_batch_equals_its_sounds_in_any_order(case: Case) -> None:
    features = [case.prepare(one) for one in case.sounds()]
    alone = [case.run([item])[0] for item in features]
    for order in (tuple(range(6)), (5, 0, 3, 1, 4, 2), (2, 2, 0)):
        for batch in case.batches(features, order):
            for i, out in zip(batch, case.run([features[i] for i in batch]), strict=True):
                assert close(out.tokens, alone[i].tokens)
                assert close(out.pooled, alone[i].pooled)


def test_a_sound_longer_than_a_window_equals_transformers_or_is_refused(case: Case) -> None:
    short = case.prepare(sound(0.7, case.rate))
    for seconds in (2.05, 4.73):
        one = sound(seconds, case.rate)
        try:
            features = case.prepare(one)
        except EncoderError as error:
            assert error.code is ErrorCode.TOO_LARGE
            assert "takes at most 2 s" in error.message
            continue
        tokens, pooled = case.reference(one)
        (alone,) = case.run([features])
        company = [short, features, short]
        assert len(case.batches(company, (0, 1, 2))) == 1, "these sounds are meant to merge"
        for out in (alone, case.run(company)[1]):
            assert close(out.tokens, tokens), seconds
            assert close(out.pooled, pooled), seconds
        assert features.num_tokens == len(tokens)
        item = MediaItem(modality=Modality.AUDIO, data=b"", digest="", seconds=seconds)
        assert abs(case.adapter.cost_table().tokens(item) - features.cost) <= 0.25 * features.cost


def test_no_mask_grows_with_the_square_of_a_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    masks: list[int] = []
    attention: Any = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        rows.append(query.shape[-2])
        masks.append(0 if attn_mask is None else attn_mask.numel())
        out: Tensor = attention(query, *args, attn_mask=attn_mask, **kwargs)
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    one = case.prepare(sound(1.9, case.rate))
    case.run([one])
    most, alone = max(rows), max(masks)
    case.run([one] * 6)
    assert max(rows) == most <= one.cost, "sounds are attended to together"
    assert max(masks) <= 6 * alone


def test_results_are_bit_stable_and_depend_on_the_sound(case: Case) -> None:
    first, other = case.prepare(sound(1.0, case.rate)), case.prepare(sound(1.1, case.rate))
    one, again, different = case.run([first])[0], case.run([first])[0], case.run([other])[0]
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.allclose(one.tokens.mean(0), different.tokens.mean(0), atol=1e-4)


def test_every_length_is_encoded_or_refused_with_a_reason(case: Case) -> None:
    refused = set()
    for count in (0, 1, 2, 100, 159, 160, 161, 320, 321, 399, 400, 401, 640, 1000, 3000, 31_999, 32_000, 32_001):
        one = Sound(samples=np.full(count, 0.1, np.float32), rate=case.rate)
        try:
            features = case.prepare(one)
        except EncoderError as error:
            assert error.code in (ErrorCode.MEDIA_CORRUPT, ErrorCode.TOO_LARGE)
            assert "this model takes at" in error.message
            refused.add(count)
        else:
            (out,) = case.run([features])
            assert out.tokens.shape[0] == features.num_tokens > 0
            assert bool(torch.isfinite(out.tokens).all())
    assert 0 in refused
    assert 3000 not in refused


def test_the_price_from_the_header_is_near_the_real_cost(case: Case) -> None:
    table = case.adapter.cost_table()
    for seconds in (0.5, 1.0, 1.9):
        item = MediaItem(modality=Modality.AUDIO, data=b"", digest="", seconds=seconds)
        cost = case.prepare(sound(seconds, case.rate)).cost
        assert abs(table.tokens(item) - cost) <= max(2, 0.25 * cost), seconds


def test_half_precision_works(case: Case) -> None:
    adapter = load_adapter(case.folder, dataclasses.replace(case.context, dtype=torch.bfloat16))
    one = sound(1.0, case.rate)
    with torch.inference_mode():
        (out,) = adapter.forward(adapter.pack([adapter.preprocessor.preprocess_audio(one)]))
    assert out.tokens.dtype is torch.bfloat16
    assert close(out.tokens, case.reference(one)[0], tolerance=0.1)
