"""The price of a sound from its length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.cost import AudioCost

SECONDS = st.floats(0.001, 5000)


@given(SECONDS)
def test_windows_are_paid_for_whole(seconds: float) -> None:
    cost = AudioCost(tokens_per_s=50, max_s=600, step_s=30)
    assert cost.tokens(seconds) % 1500 == 0
    assert 0 <= cost.tokens(seconds) - 50 * min(seconds, 600) < 1500


@given(SECONDS)
def test_without_windows_a_price_is_that_of_the_length_within_the_bounds(seconds: float) -> None:
    cost = AudioCost(tokens_per_s=13, min_s=0.5, max_s=1800)
    assert 0 <= cost.tokens(seconds) - 13 * min(max(seconds, 0.5), 1800) < 1


def test_an_unknown_length_is_the_longest() -> None:
    assert AudioCost(tokens_per_s=50, max_s=100, step_s=30).tokens(0.0) == 6000
