"""How long a client is asked to wait."""

from __future__ import annotations

import pytest

from spmd_encoder.dispatcher.pace import KEPT_S, LEAST_S, MOST_S, Pace


def test_it_follows_what_was_answered() -> None:
    pace = Pace()
    assert pace.wait_s(10_000, 0.0) == LEAST_S, "nothing is known yet"
    for second in range(6):
        pace.answered(100, float(second))
    assert pace.wait_s(1000, 5.0) == 10.0, "500 tokens in the 5 s since the first answer"
    assert pace.wait_s(1, 5.0) == LEAST_S
    assert pace.wait_s(10**9, 5.0) == MOST_S


def test_only_the_last_seconds_count() -> None:
    pace = Pace()
    for second in range(100):
        pace.answered(10 if second < 50 else 1000, float(second))
    assert pace.wait_s(5000, 99.0) == pytest.approx(5.0)


def test_a_world_that_stops_answering_seems_slow() -> None:
    pace = Pace()
    for second in range(11):
        pace.answered(100, float(second))
    assert pace.wait_s(1000, 10.0) == pytest.approx(10.0)
    assert pace.wait_s(1000, 20.0) == pytest.approx(20.0)


def test_the_past_is_forgotten() -> None:
    pace = Pace()
    for second in range(11):
        pace.answered(100, float(second))
    pace.begin()
    assert pace.wait_s(1000, 10.0 + KEPT_S) > LEAST_S
    assert pace.wait_s(1000, 10.1 + KEPT_S) == LEAST_S


def test_time_without_work_does_not_make_a_burst_seem_slow() -> None:
    pace = Pace()
    for tenth in range(11):
        pace.answered(100, tenth / 10)
    for burst in range(1, 5):  # ten seconds apart, one of which is busy
        pace.begin()
        assert pace.wait_s(5000, 10.0 * burst) == pytest.approx(5.0), "known from the burst before"
        for tenth in range(11):
            pace.answered(100, 10.0 * burst + 3.0 + tenth / 10)  # the time until the first answer is no pace
        assert pace.wait_s(5000, 10.0 * burst + 4.0) == pytest.approx(5.0)


def test_answers_that_were_no_work_say_nothing() -> None:
    """Probes come while there is no work."""
    pace = Pace()
    for tenth in range(11):
        pace.answered(100, tenth / 10)
    pace.answered(0, 11.0)
    pace.answered(0, 21.0)
    pace.begin()
    assert pace.wait_s(5000, 22.0) == pytest.approx(5.0)
    pace.answered(100, 22.0)
    pace.answered(100, 22.1)
    assert pace.wait_s(5000, 22.1) == pytest.approx(5.0)


def test_nothing_is_in_hand_for_longer_than_a_request_may_take() -> None:
    for most_s, said_s in ((8.0, 8.0), (0.5, LEAST_S), (600.0, MOST_S)):
        pace = Pace(most_s)
        pace.answered(1, 1.0)
        pace.answered(1, 2.0)
        assert pace.wait_s(10**6, 2.0) == said_s
