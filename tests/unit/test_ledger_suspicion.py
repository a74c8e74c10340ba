"""The ledger when workers die: who is suspected, who runs alone, who is refused."""

from __future__ import annotations

from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, NewJob, Withdraw
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.errors import EncoderError, ErrorCode
from tests.harness.ledger_book import alone, failures, job, ledger, placed


def test_only_suspects_are_retried_alone() -> None:
    book = ledger(1)
    book.submit([job(1), job(2), job(3)], 0.0)
    assert book.replica_lost(0, (2,), 0.0) == []
    assert alone(book.replica_ready(0)) == {1: False, 2: True, 3: False}
    assert book.retried == 3


def test_with_no_report_all_are_suspects() -> None:
    book = ledger(1)
    book.submit([job(1), job(2)], 0.0)
    book.replica_lost(0, None, 0.0)
    assert alone(book.replica_ready(0)) == {1: True, 2: True}


def test_an_equal_item_is_alone_while_its_digest_is_under_suspicion() -> None:
    book = ledger(1)
    book.submit([job(1, "x")], 0.0)
    book.replica_lost(0, (1,), 0.0)
    book.replica_ready(0)
    assert alone(book.submit([job(2, "x", output="pooled"), job(3)], 0.0)) == {3: False}
    assert alone(book.failed(0, 1, EncoderError(ErrorCode.CANCELLED, "gone"))) == {2: True}
    book.completed(0, 2)
    assert alone(book.submit([job(4, "x")], 0.0)) == {4: False}, "a success clears it"


def kill_twice(book: Ledger, victim: NewJob, now: float = 0.0) -> list[Command]:
    book.submit([victim], now)
    book.replica_lost(0, (victim.job_id,), now)
    book.replica_ready(0)
    return book.replica_lost(0, (victim.job_id,), now)


def test_two_deaths_are_enough_and_are_forgotten_in_time() -> None:
    book = ledger(1)
    commands = kill_twice(book, job(1, "x"))
    assert failures(commands) == {1: ErrorCode.WORKER_DIED}
    assert [command.replica for command in commands if isinstance(command, Fail)] == [0], "who lost it is told"
    assert book.retried == 1
    assert book.num_jobs == 0
    book.replica_ready(0)
    assert failures(book.submit([job(2, "x"), job(3)], 599.9)) == {2: ErrorCode.WORKER_DIED}
    assert alone(book.submit([job(4, "x")], 600.0)) == {4: False}


def test_an_input_that_nobody_has_seen_meets_one_replica_however_often_it_is_sent() -> None:
    book = ledger(3)
    many = [job(n, "x", output=("tokens", "pooled")[n % 2]) for n in range(8)]
    first = placed(book.submit([*many, job(8), job(9)], 0.0))
    assert first[0] == (0, 1), "one work per output, on one replica"
    assert sorted([*first[1], *first[2]]) == [8, 9]
    # One death for all copies; then one copy at a time in the whole world, alone.
    (again,) = placed(book.replica_lost(0, (0, 1), 0.0)).items()
    assert again[1] == (0,)
    assert book.replica_ready(0) == []
    assert set(failures(book.replica_lost(again[0], (0,), 0.0))) == set(range(8))
    assert book.num_jobs == 2


def test_copies_stay_together_and_the_next_ones_go_anywhere() -> None:
    book = ledger(2)
    book.submit([job(1, "x")], 0.0)
    book.completed(0, 1)
    assert placed(book.submit([job(2, "x"), job(3), job(4, "x", output="pooled")], 0.0)) == {1: (2, 4), 0: (3,)}
    book.cancel([2])
    book.completed(1, 4)
    assert placed(book.submit([job(5, "x")], 0.0)) == {1: (5,)}, "a withdrawn copy may still be at work"
    book.completed(1, 2)
    book.completed(1, 5)
    book.submit([job(6, cost=9)], 0.0)
    assert placed(book.submit([job(7, "x")], 0.0)) == {0: (7,)}


def test_others_pass_what_waits_for_a_copy_of_itself() -> None:
    book = ledger(2)
    book.submit([job(1, "x")], 0.0)
    book.replica_lost(0, (1,), 0.0)
    assert placed(book.submit([job(2, "x", output="pooled"), job(3)], 0.0)) == {1: (3,)}
    assert placed(book.completed(1, 1)) == {1: (2,)}


def test_workers_that_fall_together_convict_nobody() -> None:
    """Two replicas are killed from outside, each while it encodes a picture, and once more while it encodes an equal
    one."""
    book = ledger(2)
    for first in (0, 2):
        where = placed(book.submit([job(first, "x"), job(first + 1, "y")], 0.0))
        assert where.keys() == {0, 1}
        assert failures([c for replica in (0, 1) for c in book.replica_lost(replica, where[replica], 0.0)]) == {}
        assert alone(book.replica_ready(0)) == {first: True, first + 1: True}
        for number in (first, first + 1):
            assert book.completed(0, number) == [Deliver((number,), 0)]
        book.replica_ready(1)


def test_a_suspicion_is_forgotten_in_time() -> None:
    book = ledger(1)
    book.submit([job(1, "x")], 0.0)
    book.replica_lost(0, (1,), 0.0)
    book.cancel([1])
    book.tick(600.0)
    book.replica_ready(0)
    assert alone(book.submit([job(2, "x")], 600.0)) == {2: False}


def test_an_answer_clears_a_suspicion_whatever_it_says_but_not_a_withdrawal() -> None:
    book = ledger(1)
    for number, code in enumerate((ErrorCode.MEDIA_CORRUPT, ErrorCode.CANCELLED)):
        first, second = 10 * number, 10 * number + 1
        book.submit([job(first, code)], 0.0)
        book.replica_lost(0, (first,), 0.0)
        book.replica_ready(0)
        book.failed(0, first, EncoderError(code, "no"))
        assert alone(book.submit([job(second, code)], 0.0)) == {second: code is ErrorCode.CANCELLED}
        book.completed(0, second)


def test_equal_items_of_one_request_are_one_death() -> None:
    book = ledger(1)
    book.submit([job(1, "x"), job(2, "x"), job(3, "y")], 0.0)
    assert failures(book.replica_lost(0, (1, 2, 3), 0.0)) == {}
    assert alone(book.replica_ready(0)) == {1: True, 3: True}
    assert failures(book.replica_lost(0, (1,), 0.0)) == {1: ErrorCode.WORKER_DIED, 2: ErrorCode.WORKER_DIED}
    assert placed(book.replica_ready(0)) == {0: (3,)}


def test_a_success_between_two_deaths_clears_the_digest() -> None:
    book = ledger(1)
    book.submit([job(1, "x")], 0.0)
    book.replica_lost(0, (1,), 0.0)
    book.replica_ready(0)
    book.completed(0, 1)
    book.submit([job(2, "x")], 0.0)
    assert failures(book.replica_lost(0, (2,), 0.0)) == {}


def test_what_waits_with_a_digest_that_kills_is_refused_too() -> None:
    book = ledger(1, items=1)
    book.submit([job(1, "x"), job(2, "y"), job(3, "x")], 0.0)
    book.replica_lost(0, (1,), 0.0)
    book.replica_ready(0)
    assert failures(book.replica_lost(0, (1,), 0.0)) == {1: ErrorCode.WORKER_DIED, 3: ErrorCode.WORKER_DIED}
    assert placed(book.replica_ready(0)) == {0: (2,)}


def test_a_quarantine_that_is_over_holds_nothing_back() -> None:
    book = ledger(1)
    kill_twice(book, job(1, "x"))
    book.replica_ready(0)
    assert placed(book.submit([job(9, "x")], 700.0)) == {0: (9,)}, "no tick came in between"


def test_a_late_job_is_still_blamed_for_the_death_it_causes() -> None:
    """An input that hangs its worker is answered with 504 before the replica falls; twice, then it is refused."""
    book = Ledger([0], max_items=8, window_items=4, window_tokens=100)
    book.replica_ready(0)
    for number in (1, 2):
        now = float(number * 10)
        book.submit([NewJob(job_id=number, digest="sha256:bad", cost_tokens=1, deadline=now + 1)], now)
        assert [type(command) for command in book.tick(now + 2)] == [Withdraw, Fail]
        book.replica_lost(0, [number], now + 3)
        book.replica_ready(0)
    (refused,) = book.submit([NewJob(job_id=3, digest="sha256:bad", cost_tokens=1, deadline=99.0)], 40.0)
    assert isinstance(refused, Fail)
    assert refused.error.code is ErrorCode.WORKER_DIED
