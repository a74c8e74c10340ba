"""When a free tower waits for an item that is nearly prepared; a replica in miniature shows what comes of it."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.scheduler.patience import Patience


def learned(*, fixed_s: float, token_s: float, gap_s: float) -> Patience:
    """Has seen forwards of 1 to 4 items of 10 tokens, and items prepared every `gap_s`; at 100 s one more begins."""
    patience = Patience()
    patience.preparation_began(100.0 - 5 * gap_s)
    patience.preparation_began(100.0 - 5 * gap_s)
    for left in (4, 3, 2, 1):
        patience.preparation_ended(100.0 - left * gap_s)
        patience.preparation_began(100.0 - left * gap_s)
    patience.preparation_ended(100.0)
    for items in (1, 2, 3, 4, 1, 2):
        patience.forward_ended(10 * items, fixed_s + token_s * 10 * items)
    return patience


def test_it_waits_where_a_forward_costs_more_than_the_wait_and_no_longer_than_it_is_worth() -> None:
    # Worth waiting for: (5 + 1) / 2 - 1 = 2 s for one that waits, (5 + 1) / 5 - 1 = 0.2 s for four.
    patience = learned(fixed_s=5.0, token_s=0.1, gap_s=1.5)
    assert patience.wait_s(100.0, items=1, cost=10) == pytest.approx(2.0)
    assert patience.wait_s(100.0, items=4, cost=40) == 0.0
    assert patience.wait_s(101.4, items=4, cost=40) == pytest.approx(0.2), "it is nearly there"


def test_an_item_that_is_late_is_not_waited_for() -> None:
    patience = learned(fixed_s=5.0, token_s=0.1, gap_s=1.5)
    assert patience.wait_s(102.0, items=1, cost=10) == pytest.approx(1.0), "until twice the usual time has passed"
    assert patience.wait_s(103.0, items=1, cost=10) == 0.0
    assert patience.wait_s(200.0, items=1, cost=10) == 0.0


def test_items_that_failed_in_place_of_a_forward_teach_nothing() -> None:
    patience, other = (learned(fixed_s=5.0, token_s=0.1, gap_s=1.5) for _ in range(2))
    for _ in range(50):
        patience.forward_ended(10, 0.0)
    assert patience.wait_s(100.0, items=1, cost=10) == other.wait_s(100.0, items=1, cost=10) > 0.0


def test_a_lone_item_never_waits() -> None:
    patience = learned(fixed_s=5.0, token_s=0.1, gap_s=1.5)
    patience.preparation_ended(100.0)
    assert patience.wait_s(100.0, items=1, cost=10) == 0.0


def test_nothing_is_waited_for_before_anything_is_known() -> None:
    patience = Patience()
    assert patience.wait_s(0.0, items=1, cost=10) == 0.0
    patience.preparation_began(0.0)
    assert patience.wait_s(0.0, items=1, cost=10) == 0.0
    patience.preparation_ended(1.0)
    patience.preparation_began(1.0)
    assert patience.wait_s(1.0, items=1, cost=10) == 0.0


def test_a_tower_whose_forwards_cost_their_items_alone_never_waits() -> None:
    assert learned(fixed_s=0.0, token_s=0.1, gap_s=0.1).wait_s(100.0, items=1, cost=10) == 0.0


def test_a_fixed_part_that_nobody_has_seen_is_found_out_by_trying() -> None:
    patience = learned(fixed_s=0.0, token_s=0.0, gap_s=0.1)
    for _ in range(500):
        patience.forward_ended(10, 1.0)  # all alike: it may be fixed or not
    assert patience.wait_s(100.0, items=1, cost=10) > 0.0
    for _ in range(5):
        patience.forward_ended(20, 2.0)
    assert patience.wait_s(100.0, items=1, cost=10) == 0.0


@given(
    forwards=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e3)), max_size=20),
    gaps=st.lists(st.floats(0, 1e3), min_size=1, max_size=20),
    elapsed=st.floats(0, 1e4),
    items=st.integers(1, 64),
    cost=st.integers(1, 10**6),
)
def test_whatever_was_seen_the_wait_is_bounded(
    forwards: list[tuple[int, float]], gaps: list[float], elapsed: float, items: int, cost: int
) -> None:
    patience, now = Patience(), 0.0
    patience.preparation_began(now)
    for gap in gaps:
        patience.preparation_began(now)
        now += gap
        patience.preparation_ended(now)
    for spent in forwards:
        patience.forward_ended(*spent)
    wait = patience.wait_s(now + elapsed, items=items, cost=cost)
    longest = max((seconds for _, seconds in forwards), default=0.0)
    assert 0.0 <= wait <= 2 * max(gaps) + 1e-9
    assert wait <= longest + 1e-9, "nobody waits longer than a forward takes"


def replica(clients: int, *, prepare_s: float, fixed_s: float, item_s: float, patient: bool) -> tuple[float, float]:
    """Items per second and mean batch of `clients` that each send their next item when they have their last, over one
    preparer and one tower that have a processor each."""
    patience, now, done, batches = Patience(), 0.0, 0, 0
    waiting, ready = clients, 0
    events: list[tuple[float, str, int]] = []
    is_preparing = is_running = False
    for _ in range(clients):
        patience.preparation_began(now)
    while done < 2000:
        if waiting and not is_preparing:
            is_preparing, waiting = True, waiting - 1
            heapq.heappush(events, (now + prepare_s, "prepared", 1))
        if ready and not is_running:
            wait = patience.wait_s(now, items=ready, cost=10 * ready) if patient else 0.0
            if wait > 1e-12:
                heapq.heappush(events, (now + wait, "waited", 0))
            else:
                is_running, batch, ready = True, ready, 0
                heapq.heappush(events, (now + fixed_s + item_s * batch, "ran", batch))
        now, what, count = heapq.heappop(events)
        if what == "prepared":
            is_preparing, ready = False, ready + 1
            patience.preparation_ended(now)
        elif what == "ran":
            is_running, done, batches = False, done + count, batches + 1
            patience.forward_ended(10 * count, fixed_s + item_s * count)
            waiting += count
            for _ in range(count):
                patience.preparation_began(now)
    return done / now, done / batches


def test_a_replica_is_as_fast_with_fewer_forwards() -> None:
    times = {"prepare_s": 1.0, "fixed_s": 3.0, "item_s": 0.2}
    rate, batch = replica(8, **times, patient=False)
    patient_rate, patient_batch = replica(8, **times, patient=True)
    assert patient_rate >= 0.999 * rate
    assert patient_batch >= batch


def test_two_clients_in_step_share_forwards() -> None:
    """Each alone would hold the other up by a whole forward."""
    times = {"prepare_s": 0.5, "fixed_s": 5.0, "item_s": 0.1}
    rate, batch = replica(2, **times, patient=False)
    patient_rate, patient_batch = replica(2, **times, patient=True)
    assert (batch, patient_batch) == (pytest.approx(1.0, abs=0.01), pytest.approx(2.0, abs=0.05))
    assert patient_rate > 1.5 * rate


@pytest.mark.parametrize("clients", [1, 2, 8, 32])
def test_nothing_changes_for_a_tower_whose_forwards_cost_their_items_alone(clients: int) -> None:
    times = {"prepare_s": 1.0, "fixed_s": 0.0, "item_s": 10.0}
    assert replica(clients, **times, patient=True)[0] >= 0.99 * replica(clients, **times, patient=False)[0]
