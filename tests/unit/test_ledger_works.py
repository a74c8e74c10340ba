"""Equal items are one work in the ledger, and go where their results are held."""

from __future__ import annotations

from spmd_encoder.dispatcher.commands import Deliver, Send, Withdraw
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.ledger_book import KEPT, failures, job, ledger, placed

# -- equal items at the same time


def test_equal_items_are_one_work_and_all_are_answered() -> None:
    book = ledger(2)
    assert placed(book.submit([job(1, "x"), job(2, "y"), job(3, "x")], 0.0)) == {0: (1,), 1: (2,)}
    assert book.submit([job(4, "x")], 0.0) == []
    assert (book.num_jobs, book.joined) == (4, 2)
    assert book.load(0).outstanding_items == 1
    assert book.completed(0, 1) == [Deliver((1, 3, 4), 0)]
    assert book.num_jobs == 1
    assert placed(book.submit([job(5, "x")], 0.0)) == {0: (5,)}, "what is over is not joined"


def test_another_output_is_another_work() -> None:
    book = ledger(1)
    assert placed(book.submit([job(1, "x"), job(2, "x", output="pooled")], 0.0)) == {0: (1, 2)}


def test_a_caller_that_leaves_takes_nobody_with_it() -> None:
    book = ledger(1)
    book.submit([job(1, "x"), job(2, "x")], 0.0)
    assert book.cancel([1]) == [], "the work goes on for the other one"
    book.replica_lost(0, (), 0.0)
    (again,) = (command for command in book.replica_ready(0) if isinstance(command, Send))
    assert (again.work_ids, again.job_ids) == ((1,), (2,)), "its bytes come from who is still there"
    assert book.cancel([2]) == [Withdraw(0, (1,))]
    assert placed(book.submit([job(3, "x")], 0.0)) == {0: (3,)}, "a withdrawn work is not joined"
    assert book.completed(0, 1) == []
    assert book.completed(0, 3) == [Deliver((3,), 0)]


def test_a_failure_is_everybodys_and_is_not_kept() -> None:
    book = ledger(1)
    book.submit([job(1, "x"), job(2, "x")], 0.0)
    error = EncoderError(ErrorCode.MEDIA_CORRUPT, "no")
    assert failures(book.failed(0, 1, error)) == {1: ErrorCode.MEDIA_CORRUPT, 2: ErrorCode.MEDIA_CORRUPT}
    assert placed(book.submit([job(3, "x")], 0.0)) == {0: (3,)}


def test_each_job_has_its_own_time() -> None:
    book = ledger(1)
    book.submit([job(1, "x", deadline=5.0)], 0.0)
    book.submit([job(2, "x", deadline=50.0), job(3, "x", deadline=4.0)], 0.0)
    assert failures(book.tick(4.5)) == {3: ErrorCode.DEADLINE_EXCEEDED}
    late = EncoderError(ErrorCode.DEADLINE_EXCEEDED, "its time was over")
    commands = book.failed(0, 1, late)
    assert failures(commands) == {1: ErrorCode.DEADLINE_EXCEEDED}
    assert [c for c in commands if isinstance(c, Send)] == [Send(0, (1,), (2,), (50.0,), (False,))]
    assert failures(book.failed(0, 1, late)) == {2: ErrorCode.DEADLINE_EXCEEDED}
    assert book.num_jobs == 0


# -- results that replicas hold


def test_an_item_goes_where_its_result_is_held_and_costs_next_to_nothing_there() -> None:
    book = ledger(2, known=10)
    book.submit([job(1, "x", cost=50), job(2, "y", cost=50)], 0.0)
    book.completed(1, 2, KEPT)
    book.completed(0, 1, KEPT)
    book.submit([job(3, cost=9), job(4, cost=9)], 0.0)
    assert placed(book.submit([job(5, "x", cost=50), job(6, "y", cost=50)], 0.0)) == {0: (5,), 1: (6,)}
    assert [book.load(replica).outstanding_tokens for replica in (0, 1)] == [10, 10]
    assert placed(book.submit([job(7, "x", cost=50, output="pooled")], 0.0)) == {0: (7,)}, "that is not held"
    assert book.load(0).outstanding_tokens == 60


def test_what_is_held_waits_for_no_room_and_takes_none() -> None:
    book = ledger(1, items=1, known=10)
    book.submit([job(1, "x")], 0.0)
    book.completed(0, 1, KEPT)
    assert placed(book.submit([job(2), job(3)], 0.0)) == {0: (2,)}
    assert placed(book.submit([job(4, "x"), job(5)], 0.0)) == {0: (4,)}
    assert placed(book.submit([job(6, "x", output="pooled")], 0.0)) == {}, "that is not held"
    assert book.completed(0, 4, KEPT) == [Deliver((4,), 0)], "room that it did not take is not given to another"
    assert placed(book.completed(0, 2)) == {0: (3,)}


def test_what_may_have_been_dropped_meanwhile_is_bounded_and_charged_when_that_is_known() -> None:
    book = ledger(1, items=2, known=100)
    for number in range(10):
        book.submit([job(number, f"x{number}", cost=50)], 0.0)
        book.completed(0, number, KEPT)
    again = [job(100 + number, f"x{number}", cost=50) for number in range(10)]
    assert placed(book.submit(again, 0.0)) == {0: tuple(range(100, 108))}, "four times as many as are encoded"
    assert book.load(0).outstanding_tokens == 8
    assert book.waiting_tokens == 2
    assert placed(book.evicted(0, [(f"x{number}", "tokens") for number in range(3)])) == {0: (108, 109)}
    assert book.load(0).outstanding_tokens == 3 * 50 + 7
    assert placed(book.submit([job(200)], 0.0)) == {}, "three are encoded already"
    before = book.answered_tokens
    book.completed(0, 100, KEPT)
    assert book.answered_tokens == before + 50


def test_what_is_held_waits_for_its_holder_to_come_back_or_to_be_lost() -> None:
    book = ledger(2, known=10)
    book.submit([job(1, "x")], 0.0)
    book.completed(0, 1, KEPT)
    book.replica_away(0)
    assert book.submit([job(2, "x")], 0.0) == []
    assert placed(book.submit([job(3)], 0.0)) == {1: (3,)}, "which is nobody else's concern"
    assert book.waiting_tokens == 1
    assert placed(book.replica_lost(0, (), 0.0)) == {1: (2,)}, "as any other"


def test_what_a_replica_has_dropped_is_not_held() -> None:
    book = ledger(2, known=10)
    book.submit([job(1, "x"), job(2, "y")], 0.0)
    book.completed(0, 1, KEPT)
    book.completed(1, 2, KEPT)
    book.evicted(1, [("x", "tokens")])
    book.submit([job(3, cost=9)], 0.0)
    assert placed(book.submit([job(4, "x")], 0.0)) == {0: (4,)}, "another replica cannot drop it"
    book.completed(0, 4, KEPT)
    book.evicted(0, [("x", "tokens")])
    assert placed(book.submit([job(5, "x")], 0.0)) == {1: (5,)}
    book.replica_lost(1, (), 0.0)
    book.replica_ready(1)
    book.submit([job(6, cost=20)], 0.0)
    assert 7 in placed(book.submit([job(7, "y")], 0.0)).get(0, ()), "its memory went with its worker"


def test_the_directory_is_bounded() -> None:
    book = Directory(2)
    for number in range(5):
        book.learn((f"d{number}", ""), 0, KEPT)
    assert (len(book), book.holders(("d4", "")), book.holders(("d0", ""))) == (2, (0,), ())
