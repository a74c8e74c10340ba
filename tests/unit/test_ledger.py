"""The ledger's promises one by one; `tests/property/test_ledger.py` mixes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spmd_encoder.api.types import HeldResult, OutputKind
from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, NewJob, Send, Withdraw
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.errors import EncoderError, ErrorCode

KEPT = HeldResult(kind=OutputKind.TOKENS, shape=(1, 2), dtype="float32", num_tokens=1, grid=None)


def ledger(
    replicas: int = 2, *, ready: bool = True, items: int = 4, tokens: int = 100, most: int = 50, known: int = 0
) -> Ledger:
    book = Ledger(
        range(replicas),
        max_items=most,
        window_items=items,
        window_tokens=tokens,
        quarantine_s=600.0,
        directory=Directory(known),
    )
    if ready:
        for replica in range(replicas):
            book.replica_ready(replica)
    return book


def job(
    job_id: int, digest: str | None = None, *, cost: int = 1, deadline: float = 1e9, output: str = "tokens"
) -> NewJob:
    return NewJob(job_id=job_id, digest=digest or f"d{job_id}", cost_tokens=cost, deadline=deadline, output=output)


def sent(replica: int, job_id: int, deadline: float = 1e9) -> Send:
    return Send(replica, (job_id,), (job_id,), (deadline,), (False,))


def placed(commands: Sequence[Command]) -> dict[int, tuple[int, ...]]:
    return {command.replica: command.work_ids for command in commands if isinstance(command, Send)}


def alone(commands: Sequence[Command]) -> dict[int, bool]:
    sends = [command for command in commands if isinstance(command, Send)]
    return {job_id: flag for send in sends for job_id, flag in zip(send.work_ids, send.alone, strict=True)}


def failures(commands: Sequence[Command]) -> dict[int, ErrorCode]:
    return {command.job_id: command.error.code for command in commands if isinstance(command, Fail)}


def test_equal_items_are_spread_evenly() -> None:
    assert placed(ledger().submit([job(n) for n in range(6)], 0.0)) == {0: (0, 2, 4), 1: (1, 3, 5)}


def test_cost_decides_where_an_item_goes() -> None:
    book = ledger()
    assert placed(book.submit([job(1, cost=10), job(2, cost=1), job(3, cost=1), job(4, cost=1)], 0.0)) == {
        0: (1,),
        1: (2, 3, 4),
    }


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


def test_the_lost_go_before_what_waited_oldest_first() -> None:
    book = ledger(2, items=2)
    assert placed(book.submit([job(n) for n in range(6)], 0.0)) == {0: (0, 2), 1: (1, 3)}
    book.replica_away(0)
    book.replica_away(1)
    book.replica_lost(0, (), 0.0)
    book.replica_lost(1, (), 0.0)
    assert placed(book.replica_ready(0)) == {0: (0, 1)}
    assert placed(book.replica_ready(1)) == {1: (2, 3)}


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


def test_where_it_is_held_may_have_no_room() -> None:
    book = ledger(2, items=1, known=10)
    book.submit([job(1, "x")], 0.0)
    book.completed(0, 1, KEPT)
    book.submit([job(2), job(3)], 0.0)
    assert book.submit([job(4, "x")], 0.0) == []
    assert placed(book.completed(1, 3, KEPT) or book.completed(1, 2, KEPT)) == {1: (4,)}


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
