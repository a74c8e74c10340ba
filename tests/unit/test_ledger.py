"""The ledger's promises one by one; `tests/property/test_ledger.py` mixes them."""

from __future__ import annotations

import pytest

from spmd_encoder.dispatcher.commands import Deliver, NewJob, Withdraw
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.ledger_book import alone, failures, job, ledger, placed, sent


def test_equal_items_are_spread_evenly() -> None:
    assert placed(ledger().submit([job(n) for n in range(6)], 0.0)) == {0: (0, 2, 4), 1: (1, 3, 5)}


def test_cost_decides_where_an_item_goes() -> None:
    book = ledger()
    assert placed(book.submit([job(1, cost=10), job(2, cost=1), job(3, cost=1), job(4, cost=1)], 0.0)) == {
        0: (1,),
        1: (2, 3, 4),
    }


def test_a_large_item_does_not_go_where_more_is_to_be_done_because_small_ones_take_all_places() -> None:
    book = ledger(2, items=4, tokens=1000)
    assert placed(book.submit([job(1, cost=300)], 0.0)) == {0: (1,)}
    book.submit([job(n, cost=10) for n in range(2, 6)], 0.0)
    assert [book.load(r).outstanding_items for r in (0, 1)] == [1, 4]
    assert book.submit([job(6, cost=200), job(7, cost=10)], 0.0) == [], "40 tokens and these are done before 300"
    assert placed(book.completed(1, 2)) == {1: (6,)}
    assert placed(book.completed(1, 3)) == {1: (7,)}
    assert placed(book.submit([job(8, cost=200)], 0.0)) == {0: (8,)}, "230 and these are not"


def test_what_does_not_fit_waits_and_goes_first() -> None:
    book = ledger(1, items=2)
    assert placed(book.submit([job(n) for n in range(4)], 0.0)) == {0: (0, 1)}
    assert book.submit([job(4)], 0.0) == []
    assert book.completed(0, 1) == [Deliver((1,), 0), sent(0, 2)]


def test_a_large_item_runs_alone_and_is_not_overtaken() -> None:
    book = ledger(1, tokens=10)
    assert placed(book.submit([job(1, cost=5), job(2, cost=50), job(3, cost=1)], 0.0)) == {0: (1,)}
    assert placed(book.completed(0, 1)) == {0: (2,)}
    assert placed(book.completed(0, 2)) == {0: (3,)}


def test_a_full_queue_takes_nothing_of_a_request() -> None:
    book = ledger(ready=False, most=3)
    book.submit([job(1), job(2)], 0.0)
    with pytest.raises(EncoderError) as caught:
        book.submit([job(3), job(4)], 0.0)
    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert "--max-queued-items" in caught.value.message
    assert book.num_jobs == 2
    assert book.room() == 1
    book.submit([job(5)], 0.0)
    assert placed(book.replica_ready(0)) == {0: (1, 2, 5)}


def test_what_could_never_fit_is_too_large_and_probes_take_no_room() -> None:
    book = ledger(1, most=2)
    with pytest.raises(EncoderError, match="--max-queued-items 2") as caught:
        book.submit([job(1), job(2), job(3)], 0.0)
    assert caught.value.code is ErrorCode.TOO_LARGE
    book.probe(NewJob(job_id=9, digest="probe", cost_tokens=1, deadline=1e9, pinned=0))
    assert (book.room(), book.num_jobs, book.num_items) == (2, 1, 0)
    assert placed(book.submit([job(4), job(5)], 0.0)) == {0: (4, 5)}


def test_the_lost_go_before_what_waited_oldest_first() -> None:
    book = ledger(2, items=2)
    assert placed(book.submit([job(n) for n in range(6)], 0.0)) == {0: (0, 2), 1: (1, 3)}
    book.replica_away(0)
    book.replica_away(1)
    book.replica_lost(0, (), 0.0)
    book.replica_lost(1, (), 0.0)
    assert placed(book.replica_ready(0)) == {0: (0, 1)}
    assert placed(book.replica_ready(1)) == {1: (2, 3)}


def test_late_replies_are_ignored() -> None:
    book = ledger(2)
    book.submit([job(1)], 0.0)
    book.replica_lost(0, (), 0.0)  # it goes to the other one
    error = EncoderError(ErrorCode.INTERNAL, "x")
    assert book.completed(0, 1) == []
    assert book.failed(0, 1, error) == []
    assert book.completed(1, 77) == []
    assert book.completed(1, 1) == [Deliver((1,), 1)]
    assert book.completed(1, 1) == []
    assert book.failed(1, 1, error) == []


def test_cancel_withdraws_what_is_in_hand_and_makes_room() -> None:
    book = ledger(1, items=2)
    book.submit([job(1), job(2), job(3), job(4)], 0.0)
    assert book.cancel([1, 3, 99]) == [Withdraw(0, (1,))]
    # The replica may still be running it: there is room only when it has answered.
    assert (book.load(0).outstanding_items, book.num_jobs) == (2, 2)
    assert book.failed(0, 1, EncoderError(ErrorCode.CANCELLED, "gone")) == [sent(0, 4)]
    assert book.completed(0, 1) == []
    assert book.cancel([1]) == []
    assert book.num_jobs == 2


def test_deadlines_strike_wherever_the_job_is() -> None:
    book = ledger(1, items=1)
    book.submit([job(1, deadline=5.0), job(2, deadline=6.0), job(3)], 0.0)
    assert book.tick(4.9) == []
    commands = book.tick(6.0)
    assert failures(commands) == {1: ErrorCode.DEADLINE_EXCEEDED, 2: ErrorCode.DEADLINE_EXCEEDED}
    assert [c for c in commands if isinstance(c, Withdraw)] == [Withdraw(0, (1,))]
    assert placed(commands) == {}
    assert placed(book.completed(0, 1)) == {0: (3,)}


def test_a_probe_goes_to_a_replica_that_is_not_ready_and_dies_with_it() -> None:
    book = ledger(2, ready=False)
    book.submit([job(1)], 0.0)
    probe = NewJob(job_id=5, digest="probe", cost_tokens=3, deadline=1e9, pinned=1)
    assert book.probe(probe) == [sent(1, 5)]
    assert (book.load(1).outstanding_items, book.load(1).outstanding_tokens) == (1, 3)
    assert failures(book.replica_lost(1, None, 0.0)) == {5: ErrorCode.WORKER_DIED}
    for _ in range(3):  # probes put no digest under suspicion
        book.probe(NewJob(job_id=6, digest="probe", cost_tokens=3, deadline=1e9, pinned=1))
        book.replica_lost(1, None, 0.0)
    book.replica_ready(0)
    assert alone(book.submit([job(7, "probe")], 0.0)) == {7: False}


def test_fail_all_leaves_nothing() -> None:
    book = ledger(1, items=1)
    book.submit([job(1), job(2)], 0.0)
    commands = book.fail_all(EncoderError(ErrorCode.DRAINING, "end"))
    assert failures(commands) == {1: ErrorCode.DRAINING, 2: ErrorCode.DRAINING}
    assert [c for c in commands if isinstance(c, Withdraw)] == [Withdraw(0, (1,))]
    assert book.num_jobs == 0
    assert book.completed(0, 1) == []
    assert book.load(0).outstanding_tokens == 0
    assert book.replica_ready(0) == []
