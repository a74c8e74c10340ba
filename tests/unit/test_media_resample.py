"""The resampler against sines, whose samples at any rate are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.media.resample import Resampler, Samples
from tests.harness.examples import examples
from tests.harness.media import tone

RATES = [8_000, 11_025, 22_050, 32_000, 44_100, 44_101, 48_000, 96_000]
TARGET = 16_000


def resampled(signal: np.ndarray, source: int, target: int, piece: int = 4096) -> Samples:
    resampler = Resampler(source, target)
    out = [part for at in range(0, len(signal), piece) for part in resampler.push(signal[at : at + piece])]
    return np.concatenate([*out, *resampler.finish()])


def decibels(values: np.ndarray, reference: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(np.square(values)) / np.mean(np.square(reference)) + 1e-30))


@pytest.mark.parametrize("source", RATES)
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.93])
def test_a_sine_stays_where_it_is(source: int, share: float) -> None:
    """`share` of the lower Nyquist frequency."""
    hertz = share * min(source, TARGET) / 2
    got = resampled(tone(2 * source, source, hertz).astype(np.float32), source, TARGET)
    wanted = tone(2 * TARGET, TARGET, hertz)
    inner = slice(TARGET // 4, -TARGET // 4)
    assert len(got) == len(wanted)
    assert decibels(got[inner] - wanted[inner], wanted[inner]) < -115


@pytest.mark.parametrize("source", [rate for rate in RATES if rate > TARGET])
@pytest.mark.parametrize("share", [1.0, 1.02, 1.3])
def test_what_is_above_nyquist_does_not_come_back(source: int, share: float) -> None:
    signal = tone(2 * source, source, share * TARGET / 2 - 0.5).astype(np.float32)
    got = resampled(signal, source, TARGET)
    assert decibels(got[TARGET // 4 : -TARGET // 4], signal) < -120


def test_nothing_is_lost_at_the_edges() -> None:
    """A click stays a click, in its place, also as the first or last sample."""
    for at in (0, 500, 999):
        click = np.zeros(1000, np.float32)
        click[at] = 1
        got = resampled(click, 8_000, 16_000)
        assert int(np.abs(got).argmax()) == 2 * at
        assert 0.9 < got[2 * at] < 1.1


@examples(60)
@given(
    st.integers(1, 5000), st.integers(1_000, 192_000), st.sampled_from([8_000, 16_000, 24_000]), st.integers(1, 3000)
)
def test_the_length_and_no_dependence_on_pieces(length: int, source: int, target: int, piece: int) -> None:
    signal = np.random.default_rng(length).uniform(-1, 1, length).astype(np.float32)
    got = resampled(signal, source, target, piece)
    assert len(got) == math.ceil(length * target / source)
    assert np.abs(got - resampled(signal, source, target, length)).max() < 1e-5
