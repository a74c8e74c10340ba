"""What is taken and what is not, and what a full replica gets: nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spmd_encoder.dispatcher.commands import Command, Fail, NewJob, Send
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.dispatcher.routing import POLICIES, Load
from spmd_encoder.errors import EncoderError, ErrorCode


def ledger(*, items: int = 10, tokens: int = 0, window: int = 100, **more: float) -> Ledger:
    book = Ledger(range(2), max_items=items, max_tokens=tokens, window_items=window, window_tokens=10**9, **more)  # type: ignore[arg-type]
    for replica in range(2):
        book.replica_ready(replica)
    return book


def jobs(first: int, *costs: int, deadline: float = 1e9) -> list[NewJob]:
    return [
        NewJob(job_id=first + n, digest=f"d{first + n}", cost_tokens=cost, deadline=deadline)
        for n, cost in enumerate(costs)
    ]


def refusal(book: Ledger, new: Sequence[NewJob]) -> EncoderError:
    before = (book.num_items, book.num_tokens)
    with pytest.raises(EncoderError) as caught:
        book.submit(new, 0.0)
    assert (book.num_items, book.num_tokens) == before, "nothing of it is taken"
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 5])
def test_one_rule_for_requests_of_one_item_and_of_many(size: int) -> None:
    book = ledger(items=10, tokens=1000)
    for first in range(0, 10, size):
        book.submit(jobs(first, *[1] * size), 0.0)
    error = refusal(book, jobs(90, *[1] * size))
    assert error.code is ErrorCode.QUEUE_FULL
    assert "--max-queued-items" in error.message
    book.cancel(range(size))
    book.submit(jobs(80, *[1] * size), 0.0)


def test_tokens_are_bounded_as_items_are() -> None:
    book = ledger(tokens=100)
    book.submit(jobs(0, 40, 40), 0.0)
    assert book.num_tokens == 80
    error = refusal(book, jobs(2, 15, 6))
    assert error.code is ErrorCode.QUEUE_FULL
    assert "80 encoder tokens are in hand and 21 more" in error.message
    assert "100 (--max-queued-tokens)" in error.message
    book.submit(jobs(2, 15, 5), 0.0)
    book.completed(0, 0)
    assert book.num_tokens == 60


def test_what_could_never_fit_is_too_large() -> None:
    book = ledger(tokens=100)
    for costs in ((101,), (50, 51)):
        error = refusal(book, jobs(0, *costs))
        assert error.code is ErrorCode.TOO_LARGE
        assert "--max-queued-tokens 100" in error.message


def test_no_limit_of_tokens() -> None:
    book = ledger(tokens=0)
    book.submit(jobs(0, *[10**9] * 10), 0.0)
    assert book.num_tokens == 10**10


def test_the_price_is_given_back_however_a_job_ends() -> None:
    book = ledger(tokens=1000)
    same = [NewJob(job_id=n, digest="same", cost_tokens=7, deadline=1e9) for n in (1, 2, 3)]
    book.submit([*same, *jobs(10, 5, 5, 5, deadline=9.0), *jobs(20, 3)], 0.0)
    assert (book.num_items, book.num_tokens) == (7, 39)
    book.cancel([2])
    assert (book.num_items, book.num_tokens) == (6, 32)
    book.tick(9.0)
    assert (book.num_items, book.num_tokens) == (3, 17)
    book.probe(NewJob(job_id=30, digest="probe", cost_tokens=50, deadline=1e9, pinned=0))
    assert (book.num_items, book.num_tokens) == (3, 17), "probes are nobody's"
    book.fail_all(EncoderError(ErrorCode.DRAINING, "end"))
    assert (book.num_items, book.num_tokens, book.num_jobs) == (0, 0, 0)


def placed(commands: Sequence[Command]) -> dict[int, int]:
    return {command.replica: len(command.work_ids) for command in commands if isinstance(command, Send)}


def test_probes_are_no_answered_tokens() -> None:
    book = ledger(tokens=1000)
    book.replica_ready(0)
    book.submit(jobs(1, 7), 0.0)
    book.probe(NewJob(job_id=30, digest="probe", cost_tokens=50, deadline=1e9, pinned=0))
    book.completed(0, 30)
    assert book.answered_tokens == 0
    book.completed(0, 1)
    assert book.answered_tokens == 7


def test_a_full_replica_is_skipped() -> None:
    """Whatever the policy likes: it is asked about replicas with room alone."""
    asked: list[tuple[int, ...]] = []

    def likes_0(candidates: Sequence[int], loads: object, turn: int) -> int:
        asked.append(tuple(candidates))
        return min(candidates)

    book = Ledger(range(3), max_items=50, window_items=2, window_tokens=100, policy=likes_0)
    for replica in (0, 1):
        book.replica_ready(replica)
    assert placed(book.submit(jobs(0, 1, 1, 1, 1, 1), 0.0)) == {0: 2, 1: 2}
    assert asked == [(0, 1), (0, 1), (1,), (1,)], "2 is not ready"
    book = Ledger(range(2), max_items=50, window_items=9, window_tokens=10, policy=likes_0)
    for replica in (0, 1):
        book.replica_ready(replica)
    assert placed(book.submit(jobs(0, 8, 8, 2, 2), 0.0)) == {0: 2, 1: 2}, "tokens fill it, too"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_of_the_table(name: str) -> None:
    """It answers one of its candidates, and over time none of equals is left out."""
    loads = {replica: Load(5, 1) for replica in range(4)}
    answers = [POLICIES[name]([1, 2, 3], loads, turn) for turn in range(30)]
    assert set(answers) == {1, 2, 3}


def stages(commands: Sequence[Command]) -> dict[int, str]:
    late = [c for c in commands if isinstance(c, Fail) and c.error.code is ErrorCode.DEADLINE_EXCEEDED]
    return {fail.job_id: fail.error.message.partition("stage ")[2].partition(" ")[0] for fail in late}


def test_whose_time_is_over_is_told_where_and_its_replica_may_say_so_first() -> None:
    book = ledger(window=1, grace_s=0.25)
    book.submit(jobs(0, 1, 1, 1, deadline=5.0), 0.0)
    assert stages(book.tick(5.0)) == {2: "queue"}, "the others are in a replica's hands"
    assert stages(book.failed(0, 0, EncoderError(ErrorCode.DEADLINE_EXCEEDED, "in the stage preprocess "))) == {
        0: "preprocess"
    }
    assert stages(book.tick(5.2)) == {}
    assert stages(book.tick(5.25)) == {1: "forward"}, "what has not begun its forward is told by the replica"
