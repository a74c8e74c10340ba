"""Sounds of any length, in every family that takes them: rows as promised at the price that was asked, or a reason.

`make sweep` runs all of it, the rest of the tests a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import MediaItem, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import audio
from spmd_encoder.media.av_audio import LOUDEST
from spmd_encoder.media.base import Sound
from spmd_encoder.models import registry
from spmd_encoder.models.base import Features, LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from tests.harness import media
from tests.harness.examples import examples
from tests.harness.samples import forwards
from tests.harness.sound_families import WholeSoundModel
from tests.harness.sweeps import check_rows, features_or_refusal, sound

TOLERANCE = 1e-6
FAMILIES = [entry for entry in registry.FAMILIES if Modality.AUDIO in adapter_class(entry).modalities]


class Case:
    """`hop` and `window` in samples."""

    def __init__(self, entry: registry.FamilyEntry, folder: Path, context: LoadContext) -> None:
        adapter_class(entry).tiny_checkpoint(folder, seed=3)
        self.adapter = load_adapter(folder, context)
        self.whole = WholeSoundModel(entry.family, folder)
        self._made = self.adapter.preprocessor
        self.rate = self._made.sampling_rate
        extractor: Any = self.whole.extractor
        self.hop = int(extractor.hop_length)
        self.window = min(2 * self.rate, int(getattr(extractor, "n_samples", 0) or extractor.nb_max_samples))
        self.mirrored = int(getattr(extractor, "n_fft", 0) or extractor.fft_window_size) // 2

    def lengths(self) -> list[int]:
        """Just below, at and just above all that matters, in samples."""
        hops = [self.hop * count for count in (1, 2, 3, 4, 6, 7, 8, 100)]
        windows = [count * self.window + apart * self.hop for count in (1, 2) for apart in (-1, 0, 1, 2, 6)]
        about = {bound + off for bound in (*hops, *windows, self.mirrored, 2 * self.mirrored) for off in (-1, 0, 1)}
        return sorted({0, 1, 2, *about})

    def prepared(self, lengths: Iterable[int]) -> Iterator[tuple[int, Features | None]]:
        """None of those that are refused."""
        table = self.adapter.cost_table()
        for count in lengths:
            one = sound(count, self.rate)
            made = features_or_refusal(lambda one=one: self._made.preprocess_audio(one), "the sound lasts")
            assert count or made is None, "there is nothing to encode"
            if made is not None:
                item = MediaItem(modality=Modality.AUDIO, data=b"", digest="", seconds=count / self.rate)
                price = table.tokens(item)
                assert made.cost <= price <= max(2 * made.cost, made.cost + 2), (count, price, made.cost)
            yield count, made

    def features(self, lengths: Iterable[int]) -> Iterator[Features]:
        """Of all that are taken."""
        return (made for _, made in self.prepared(lengths) if made is not None)

    def compare(self, lengths: Iterable[int]) -> None:
        """With what transformers' whole model gives, where we take them."""
        for count in lengths:
            one = sound(count, self.rate)
            made = features_or_refusal(lambda one=one: self._made.preprocess_audio(one), "the sound lasts")
            if made is None:
                continue
            (out,) = forwards(self.adapter, [made])
            try:
                tokens, _ = self.whole.encode(one)
            except IndexError:  # transformers' Music Flamingo breaks on a window that is too short for a row
                tokens, _ = self.whole.encode(Sound(samples=one.samples[: -(count % self.window)], rate=self.rate))
            assert out.tokens.shape == tokens.shape, count
            assert float((out.tokens - tokens).abs().max() / tokens.abs().max()) <= TOLERANCE, count

    def prepare(self, samples: np.ndarray[Any, np.dtype[np.float32]]) -> Features:
        return self._made.preprocess_audio(Sound(samples=samples, rate=self.rate))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda entry: entry.family)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, context: LoadContext) -> Case:
    entry: registry.FamilyEntry = request.param
    return Case(entry, tmp_path_factory.mktemp(entry.family), context)


def test_lengths_about_hops_and_windows(case: Case) -> None:
    """What is refused is shorter, or longer, than all that is taken."""
    prepared = dict(case.prepared(case.lengths()))
    check_rows(case.adapter, [made for made in prepared.values() if made is not None])
    case.compare(case.lengths()[5::12])
    assert prepared[case.window] is not None
    assert "." not in "".join("." if made is None else "x" for made in prepared.values()).strip(".")


@pytest.mark.hypothesis
def test_any_length(case: Case) -> None:
    @examples(10)
    @given(st.lists(st.integers(0, min(3 * case.window, 10 * case.rate)), min_size=1, max_size=4))
    def check(lengths: list[int]) -> None:
        check_rows(case.adapter, list(case.features(lengths)))

    check()


def test_silence_and_the_loudest_sound(case: Case) -> None:
    tone = sound(case.rate, case.rate).samples
    loudest = (tone / np.abs(tone).max() * LOUDEST).astype(np.float32)
    check_rows(case.adapter, [case.prepare(samples) for samples in (np.zeros_like(tone), loudest, tone)])


@pytest.mark.parametrize("value", [8 * LOUDEST, 1e19, 3e38, -3e38])
def test_what_is_louder_is_no_sound(value: float) -> None:
    """Its spectrogram would not be finite, which looks like a fault of the model."""
    samples = np.full(1600, 0.1, np.float32)
    samples[800] = value
    for rate in (16_000, 8_000):
        with pytest.raises(EncoderError, match="where 1 is full scale") as caught:
            audio.decode(media.wav(samples, 16_000), rate, 60.0)
        assert caught.value.code is ErrorCode.MEDIA_CORRUPT
    samples[800] = LOUDEST
    assert audio.decode(media.wav(samples, 16_000), 16_000, 60.0).samples.max() == np.float32(LOUDEST)


@pytest.mark.sweep
def test_every_length_of_few_hops_and_many_longer_ones(case: Case) -> None:
    longest = min(3 * case.window, 12 * case.rate)
    few = range(0, 20 * case.hop, case.hop // 20)
    check_rows(case.adapter, case.features([*few, *range(0, longest, longest // 200)]))
    case.compare(range(11, longest, longest // 23))


@pytest.mark.sweep
@pytest.mark.parametrize("seconds", [60, 180.5, 599])
def test_minutes(case: Case, seconds: float) -> None:
    lengths = [int(seconds * case.rate)]
    check_rows(case.adapter, case.features(lengths))
    if seconds <= 60:
        case.compare(lengths)
