"""How long a client is asked to wait."""

from __future__ import annotations

from spmd_encoder.dispatcher.pace import LEAST_S, MOST_S, Pace


def test_it_follows_what_was_answered() -> None:
    pace = Pace()
    assert pace.wait_s(10_000, 0.0) == LEAST_S, "nothing is known yet"
    for second in range(6):
        pace.answered(100, float(second))
    assert pace.wait_s(1000, 5.0) == 10.0, "500 tokens in the 5 s since the first answer"
    assert pace.wait_s(1, 5.0) == LEAST_S
    assert pace.wait_s(10**9, 5.0) == MOST_S


def test_the_past_is_forgotten() -> None:
    pace = Pace()
    pace.answered(1_000_000, 0.0)
    pace.answered(10, 15.0)
    assert pace.wait_s(20, 20.0) == 20.0, "10 tokens in 10 s"
    assert pace.wait_s(200, 30.0) == LEAST_S


def test_time_without_work_does_not_make_a_burst_seem_slow() -> None:
    pace = Pace()
    pace.answered(10, 92.0)
    pace.begin()
    assert pace.wait_s(4000, 100.0) == LEAST_S, "nothing is known of this burst yet"
    pace.answered(400, 103.0)
    assert pace.wait_s(4000, 103.0) == LEAST_S, "the time until the first answer is no pace"
    pace.answered(400, 103.5)
    assert pace.wait_s(4000, 103.5) == 5.0, "400 tokens in half a second"


def test_nothing_is_in_hand_for_longer_than_a_request_may_take() -> None:
    for most_s, said_s in ((8.0, 8.0), (0.5, LEAST_S), (600.0, MOST_S)):
        pace = Pace(most_s)
        pace.answered(1, 1.0)
        pace.answered(1, 2.0)
        assert pace.wait_s(10**6, 2.0) == said_s
