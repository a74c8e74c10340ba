"""What every family of films promises, checked for each line of the registry against transformers' whole model.

Its tensors are compared with those of transformers' own video processors where torchvision is installed
(`tests/compat/test_video_processors.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from spmd_encoder.api.types import ItemOptions, MediaItem, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, TowerOutput
from spmd_encoder.models.loading import adapter_class, load_adapter
from tests.harness.clips import film
from tests.harness.families import REFERENCES
from tests.harness.film_families import FILM_REFERENCES

TOLERANCE = 1e-6
FAMILIES = [entry for entry in registry.FAMILIES if Modality.VIDEO in adapter_class(entry).modalities]


def films() -> list[Film]:
    return [film(4, 112, 112), film(1, 61, 90), film(5, 320, 120), film(2, 56, 300), film(8, 20, 30)]


class Case:
    def __init__(self, adapter: FamilyAdapter, whole: Any) -> None:
        self.adapter = adapter
        self._whole = whole

    def run(self, items: list[Features]) -> list[TowerOutput]:
        with torch.inference_mode():
            return self.adapter.forward(self.adapter.pack(items))

    def reference(self, features: Features) -> torch.Tensor:
        with torch.inference_mode():
            return FILM_REFERENCES[self.adapter.family](self._whole, features.tensors)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda entry: entry.family)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    entry: registry.FamilyEntry = request.param
    folder = tmp_path_factory.mktemp(entry.family)
    adapter_class(entry).tiny_checkpoint(folder, seed=3)
    whole = getattr(transformers, REFERENCES[entry.family][0]).from_pretrained(folder, dtype=torch.float32).eval()
    return Case(load_adapter(folder, context), whole)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= TOLERANCE * want.abs().max())


def test_a_film_equals_transformers_and_keeps_its_promises(case: Case) -> None:
    for one in films():
        features = case.adapter.preprocessor.preprocess_video(one)
        (out,) = case.run([features])
        assert close(out.tokens, case.reference(features)), one.info
        assert out.tokens.shape[0] == features.num_tokens
        assert features.modality is Modality.VIDEO
        assert features.details["num_frames"] == len(one.frames)


def test_a_batch_equals_its_films_in_any_order(case: Case) -> None:
    features = [case.adapter.preprocessor.preprocess_video(one) for one in films()]
    alone = [case.run([item])[0] for item in features]
    for order in (range(5), (4, 0, 3, 1, 2), (2, 2, 0)):
        by_key: dict[Any, list[int]] = {}
        for i in order:
            by_key.setdefault(case.adapter.batch_key(features[i]), []).append(i)
        for batch in by_key.values():
            for i, out in zip(batch, case.run([features[i] for i in batch]), strict=True):
                assert close(out.tokens, alone[i].tokens)


def test_frames_matter_and_so_does_their_order(case: Case) -> None:
    one = film(4, 112, 112)
    turned = Film(frames=one.frames[::-1], times=one.times, indices=one.indices, info=one.info)
    outs = [case.run([case.adapter.preprocessor.preprocess_video(f)])[0].tokens for f in (one, turned)]
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 24, 25, 100, 2000, 100_000])
@pytest.mark.parametrize("fps", [1.0, 23.976, 25.0, 60.0])
def test_frames_are_chosen_within_the_film_and_the_limits(case: Case, num_frames: int, fps: float) -> None:
    choose = case.adapter.preprocessor.choose_frames
    info = FilmInfo(num_frames=num_frames, fps=fps, seconds=num_frames / fps, width=64, height=64)
    for options in (ItemOptions(), ItemOptions(fps=0.5), ItemOptions(fps=1000.0), ItemOptions(max_frames=3)):
        chosen = list(choose(info, options))
        assert chosen, options
        assert chosen == sorted(chosen)
        assert len(set(chosen)) >= len(chosen) - 1  # GLM takes the last of an odd number twice
        assert chosen[0] >= 0
        assert chosen[-1] < num_frames
        assert len(chosen) <= len(list(choose(info, ItemOptions(fps=1000.0))))
        if options.max_frames:
            assert len(chosen) <= options.max_frames


def test_the_price_from_the_header_is_near_the_real_cost(case: Case) -> None:
    table = case.adapter.cost_table()
    for size in ((224, 224), (640, 480)):
        info = FilmInfo(num_frames=100, fps=25.0, seconds=4.0, width=size[0], height=size[1])
        count = len(list(case.adapter.preprocessor.choose_frames(info, ItemOptions())))
        cost = case.adapter.preprocessor.preprocess_video(film(count, *size)).cost
        item = MediaItem(
            modality=Modality.VIDEO, data=b"", digest="", width=size[0], height=size[1], seconds=info.seconds
        )
        assert abs(table.tokens(item) - cost) <= 0.3 * cost, size


def test_shapes_that_cannot_be_encoded_are_refused(case: Case) -> None:
    try:
        features = case.adapter.preprocessor.preprocess_video(film(2, 2000, 4))
    except EncoderError as error:
        assert error.code is ErrorCode.MEDIA_CORRUPT
        assert "2000 x 4" in error.message
    else:
        assert case.run([features])[0].tokens.shape[0] == features.num_tokens
