"""When a replica is complained about, at the edges of every limit."""

from __future__ import annotations

import pytest

from spmd_encoder.dispatcher.liveness import Limits, Liveness

LIMITS = Limits(beat_s=5.0, start_beat_s=30.0, load_s=600.0, batch_s=60.0, keeper_s=15.0)
RANKS = range(2, 4)


@pytest.fixture
def live() -> Liveness:
    liveness = Liveness(LIMITS)
    liveness.epoch_began(1, 0, 100.0)
    return liveness


def complaint(live: Liveness, now: float, *, said_hello: bool = True) -> str | None:
    return live.complaint(1, RANKS, said_hello=said_hello, now=now)


def test_a_silent_start_is_given_its_time(live: Liveness) -> None:
    assert complaint(live, 700.0, said_hello=False) is None
    assert "600 s" in (complaint(live, 700.1, said_hello=False) or "")
    assert complaint(live, 700.1) is None


def test_the_load_time_counts_from_the_epoch_and_after_its_pause(live: Liveness) -> None:
    live.epoch_began(1, 1, 730.0)
    assert complaint(live, 1330.0, said_hello=False) is None
    assert complaint(live, 1330.1, said_hello=False)


@pytest.mark.parametrize(("said_hello", "limit"), [(True, 5.0), (False, 30.0)])
def test_a_beat_that_stops(live: Liveness, said_hello: bool, limit: float) -> None:
    live.progress(3, 0, 100.0, beat_age_s=limit, busy_s=0.0)
    assert complaint(live, 101.0, said_hello=said_hello) is None
    live.progress(3, 0, 100.0, beat_age_s=limit + 0.1, busy_s=0.0)
    assert "rank 3" in (complaint(live, 101.0, said_hello=said_hello) or "")
    live.progress(3, 0, 100.0, beat_age_s=0.0, busy_s=0.0)
    assert complaint(live, 101.0, said_hello=said_hello) is None


def test_a_batch_that_does_not_end(live: Liveness) -> None:
    live.progress(2, 0, 100.0, beat_age_s=0.0, busy_s=60.0)
    assert complaint(live, 101.0) is None
    live.progress(2, 0, 100.0, beat_age_s=0.0, busy_s=60.1)
    assert "rank 2" in (complaint(live, 101.0) or "")
    assert complaint(live, 101.0, said_hello=False) is None, "loading may take longer than a batch"


def test_reports_of_another_epoch_or_of_other_ranks_say_nothing(live: Liveness) -> None:
    live.progress(2, 0, 100.0, beat_age_s=99.0, busy_s=99.0)
    live.progress(7, 1, 100.0, beat_age_s=99.0, busy_s=99.0)
    live.epoch_began(1, 1, 110.0)
    assert complaint(live, 111.0) is None
    live.progress(2, 1, 100.0, beat_age_s=99.0, busy_s=0.0)
    assert complaint(live, 111.0)


def test_a_scheduler_that_falls_silent(live: Liveness) -> None:
    assert complaint(live, 699.0) is None, "nothing was heard yet"
    live.heartbeat(1, 200.0)
    assert complaint(live, 215.0) is None
    assert "heartbeat" in (complaint(live, 215.1) or "")
    assert complaint(live, 215.1, said_hello=False) is None
    live.heartbeat(1, 215.0)
    assert complaint(live, 215.1) is None


def test_a_new_epoch_forgets_the_old_heartbeat(live: Liveness) -> None:
    live.heartbeat(1, 200.0)
    live.epoch_began(1, 1, 214.0)
    assert complaint(live, 300.0) is None


def test_replicas_are_told_apart(live: Liveness) -> None:
    live.heartbeat(0, 0.0)
    live.progress(0, 0, 100.0, beat_age_s=99.0, busy_s=0.0)
    assert complaint(live, 101.0) is None
    assert live.complaint(5, range(8, 9), said_hello=False, now=1e9) is None, "nothing is known of it"


def test_a_keeper_that_says_nothing_more(live: Liveness) -> None:
    live.progress(2, 0, 100.0, beat_age_s=0.0, busy_s=0.0)
    live.progress(3, 0, 110.0, beat_age_s=0.0, busy_s=0.0)
    assert live.silent_keepers(115.0) == []
    assert live.silent_keepers(115.1) == [2]
    live.keeper_lost(2)
    assert live.silent_keepers(125.0) == [], "it is not complained about twice"
    assert live.silent_keepers(125.1) == [3]


def test_our_own_sleep_is_nobodys_fault(live: Liveness) -> None:
    live.progress(2, 0, 100.0, beat_age_s=0.0, busy_s=0.0)
    live.heartbeat(1, 100.0)
    live.slept(50.0)
    assert complaint(live, 165.0) is None
    assert complaint(live, 165.1) is not None
    assert live.silent_keepers(165.0) == []
    assert complaint(live, 750.0, said_hello=False) is None
