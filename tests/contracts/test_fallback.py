"""Models that have no family here give transformers' own rows, item by item."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image
from torch import Tensor

from spmd_encoder.api.types import ItemOptions, MediaItem, Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, Sound
from spmd_encoder.models.base import Features, LoadContext, TowerOutput
from spmd_encoder.models.checkpoint import check_folder
from spmd_encoder.models.fallback import FallbackAdapter
from spmd_encoder.models.loading import load_adapter
from tests.harness.clips import film, only, sound
from tests.harness.fallback_families import FRAMES, STRANGERS, Stranger, WholeStranger

TOLERANCE = 1e-5
SIZES = ((224, 224), (300, 200), (61, 340), (1, 1), (3, 2), (500, 40), (1, 200), (1500, 900))
SECONDS = (0.1, 1.0, 0.37, 4.2)
FILMS = ((8, 112, 112), (40, 320, 240), (5, 61, 90), (1, 200, 150))
Item = Image.Image | Sound | Film


class Case:
    """One checkpoint, loaded by the fallback and, whole, by transformers."""

    def __init__(self, stranger: Stranger, folder: Path, context: LoadContext) -> None:
        stranger.write(folder)
        self.stranger, self.folder, self.context = stranger, folder, context
        adapter = load_adapter(folder, context)
        assert isinstance(adapter, FallbackAdapter)
        self.adapter = adapter
        self.whole = WholeStranger(stranger, folder)

    def items(self) -> list[Item]:
        photos: Any = skimage.data
        photo = Image.fromarray(photos.astronaut())
        pictures = [photo.resize(size) for size in SIZES] if Modality.IMAGE in self.stranger.rows else []
        rate = self.adapter.preprocessor.sampling_rate
        sounds = [sound(seconds, rate) for seconds in SECONDS] if Modality.AUDIO in self.stranger.rows else []
        films = [film(*sizes) for sizes in FILMS] if Modality.VIDEO in self.stranger.rows else []
        return [*pictures, *sounds, *films]

    def features(self, item: Item) -> Features:
        made = self.adapter.preprocessor
        match item:
            case Film():
                return made.preprocess_video(only(item, made.choose_frames(item.info, ItemOptions())))
            case Sound():
                return made.preprocess_audio(item)
            case _:
                return made.preprocess(item)

    def run(self, items: list[Features]) -> list[TowerOutput]:
        with torch.inference_mode():
            return self.adapter.forward(self.adapter.pack(items))


@pytest.fixture(scope="module", params=STRANGERS, ids=lambda stranger: stranger.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param.name), context)


def close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * want.abs().max())


def test_an_item_alone_equals_transformers_and_has_the_rows_that_were_promised(case: Case) -> None:
    for item in case.items():
        features = case.features(item)
        (out,) = case.run([features])
        want = case.whole.rows(item)
        assert close(out.tokens, want)
        assert features.num_tokens == len(want)
        if case.stranger.pooled:
            assert out.pooled is not None and close(out.pooled, want[0])


def test_a_batch_equals_its_items_in_any_order(case: Case) -> None:
    features = [case.features(item) for item in case.items()]
    alone = [case.run([item])[0].tokens for item in features]
    for order in (list(range(len(features))), [2, 0, 3, 1, 2]):
        assert len({case.adapter.batch_key(features[i]) for i in order}) == 1
        for index, out in zip(order, case.run([features[i] for i in order]), strict=True):
            assert torch.equal(out.tokens, alone[index])


def test_declarations_fit_together(case: Case) -> None:
    adapter = case.adapter
    check_folder(case.folder)
    assert adapter.family == "fallback"
    assert adapter.outputs == ((OutputKind.POOLED,) if case.stranger.pooled else (OutputKind.TOKENS,))
    assert adapter.embedding_dims[adapter.default_output] == case.whole.rows(case.items()[0]).shape[1]
    assert set(adapter.preprocessor.served) == set(case.stranger.rows)
    assert set(adapter.modalities) - set(adapter.preprocessor.not_served()) == set(case.stranger.rows)


def test_a_picture_s_grid_is_told_where_its_processor_tells_it(case: Case) -> None:
    for item in case.items():
        features = case.features(item)
        if case.stranger.name != "video_llama_3":
            assert features.grid is None
            continue
        assert features.grid is not None
        t, h, w = features.grid
        assert t * h * w == 4 * features.num_tokens == features.cost


def test_the_language_half_is_not_loaded(case: Case) -> None:
    whole = sum(p.numel() * p.element_size() for p in case.whole.parameters())
    assert 0 < case.adapter.tower_bytes < whole
    assert not [
        part for part in case.adapter.preprocessor.kept if part.endswith(("language_model", "lm_head", "layers"))
    ]


def test_the_price_from_the_header_is_not_below_the_real_cost(case: Case) -> None:
    table = case.adapter.cost_table()
    for item in case.items():
        cost = case.features(item).cost
        if isinstance(item, Image.Image):
            width, height = item.size
            if max(width, height) > 10 * min(width, height):
                continue  # scaled up by some models, by more than a header tells
            media = MediaItem(modality=Modality.IMAGE, data=b"", digest="", width=width, height=height)
        elif isinstance(item, Film):
            width, height, seconds = item.info.width, item.info.height, item.info.seconds
            media = MediaItem(modality=Modality.VIDEO, data=b"", digest="", width=width, height=height, seconds=seconds)
        else:
            seconds = len(item.samples) / item.rate
            media = MediaItem(modality=Modality.AUDIO, data=b"", digest="", seconds=seconds)
        assert table.tokens(media) >= 0.8 * cost


def test_every_picture_is_encoded_or_refused_with_the_reason(case: Case) -> None:
    if Modality.IMAGE not in case.stranger.rows:
        with pytest.raises(EncoderError, match="takes no image items"):
            case.features(Image.new("RGB", (50, 50)))
        return
    for size in ((1, 2), (3, 3), (3, 1), (2, 300), (27, 29), (4000, 20), (2600, 1700), (40, 7000)):
        picture = Image.effect_noise(size, 64).convert("RGB")
        try:
            features = case.features(picture)
        except EncoderError as error:
            assert error.code is ErrorCode.MEDIA_CORRUPT and f"{size[0]} x {size[1]} pixels" in error.message
        else:
            (out,) = case.run([features])
            assert close(out.tokens, case.whole.rows(picture)), size
    with pytest.raises(EncoderError, match="5000 x 2 pixels"):
        case.features(Image.new("RGB", (5000, 2)))


def test_every_sound_is_encoded_or_refused_with_the_reason(case: Case) -> None:
    if Modality.AUDIO not in case.stranger.rows:
        with pytest.raises(EncoderError, match="takes no audio items"):
            case.features(sound(1.0, 16_000))
        return
    rate = case.adapter.preprocessor.sampling_rate
    for samples in (1, 100, 400, 641, 20 * rate):
        item = sound(samples / rate, rate)
        try:
            features = case.features(item)
        except EncoderError as error:
            assert error.code is ErrorCode.MEDIA_CORRUPT and "a sound of" in error.message
        else:
            (out,) = case.run([features])
            assert close(out.tokens, case.whole.rows(item)), samples
    longest = case.adapter.cost_table().audio
    assert longest is not None
    with pytest.raises(EncoderError, match="send it in pieces"):
        case.features(sound(longest.max_s + 0.1, rate))


def test_every_film_is_encoded_or_refused_with_the_reason(case: Case) -> None:
    if Modality.VIDEO not in case.stranger.rows:
        with pytest.raises(EncoderError, match="takes no video items"):
            case.features(film(4, 50, 50))
        return
    for sizes in ((1, 1, 1), (2, 3, 2), (7, 3, 300), (90, 1, 150), (2, 1500, 900)):
        item = film(*sizes)
        (out,) = case.run([case.features(item)])
        assert close(out.tokens, case.whole.rows(item)), sizes
    with pytest.raises(EncoderError, match="frames of 3 x 900 pixels cannot be encoded"):
        case.features(film(2, 3, 900))
    with pytest.raises(EncoderError, match=f"a film of 9 pictures cannot be encoded: this model takes {FRAMES}"):
        case.adapter.preprocessor.preprocess_video(film(9, 50, 50))  # a list of pictures is taken as it is
    with pytest.raises(EncoderError, match="no frame that could be decoded"):
        case.adapter.preprocessor.preprocess_video(only(film(9, 50, 50), ()))
    lost = only(film(40, 320, 240), (0, 5, 10))  # the others could not be decoded: those that are there, repeated
    features = case.adapter.preprocessor.preprocess_video(lost)
    assert features.details["num_frames"] == 3 and features.details["timestamps"] == [0.0, 0.2, 0.4]
    (out,) = case.run([features])
    assert close(out.tokens, case.whole.rows(lost))


def test_half_precision_works(case: Case) -> None:
    adapter = load_adapter(case.folder, dataclasses.replace(case.context, dtype=torch.bfloat16))
    item = case.items()[0]
    with torch.inference_mode():
        (out,) = adapter.forward(adapter.pack([case.features(item)]))
    assert out.tokens.dtype is torch.bfloat16
    assert out.tokens.shape == case.whole.rows(item).shape
    assert bool(out.tokens.isfinite().all())
