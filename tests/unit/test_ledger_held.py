"""Which results are held where, as the ledger knows it, and jobs that have nothing but a digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spmd_encoder.api.types import HeldResult, OutputKind
from spmd_encoder.dispatcher.commands import Command, Deliver, Fail, NewJob, Send, Withdraw
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.errors import EncoderError, ErrorCode

KEPT = HeldResult(kind=OutputKind.TOKENS, shape=(3, 2), dtype="float32", num_tokens=3, grid=(1, 2, 6))
X = ("x", "tokens")


def ledger(replicas: int = 2, *, known: int = 10, **limits: Any) -> Ledger:
    fields: dict[str, Any] = {"max_items": 50, "window_items": 4, "window_tokens": 100, "directory": Directory(known)}
    book = Ledger(range(replicas), **fields | limits)
    for replica in range(replicas):
        book.replica_ready(replica)
    return book


def job(job_id: int, digest: str | None = None, **more: Any) -> NewJob:
    fields: dict[str, Any] = {"cost_tokens": 1, "deadline": 1e9, "output": "tokens"} | more
    return NewJob(job_id=job_id, digest=digest or f"d{job_id}", **fields)


def held(job_id: int, digest: str = "x", **more: Any) -> NewJob:
    return job(job_id, digest, held=True, **more)


def placed(commands: Sequence[Command]) -> dict[int, tuple[int, ...]]:
    return {command.replica: command.work_ids for command in commands if isinstance(command, Send)}


def failures(commands: Sequence[Command]) -> dict[int, ErrorCode]:
    return {command.job_id: command.error.code for command in commands if isinstance(command, Fail)}


def with_x(replica: int = 0, **limits: Any) -> Ledger:
    """One in which a replica holds `X`."""
    book = ledger(**limits)
    for job_id, digest in enumerate("xy" if replica == 0 else "yx", -2):
        book.submit([job(job_id, digest)], 0.0)
        book.completed(job_id + 2, job_id, KEPT)
    held_there = book.lookup(X)
    assert held_there is not None
    assert held_there.replicas == (replica,)
    return book


def with_x_at_both(**limits: Any) -> Ledger:
    directory = Directory(10)
    for replica in (0, 1):
        directory.learn(X, replica, KEPT)
    return ledger(directory=directory, **limits)


def test_what_is_held_is_known_with_its_holders() -> None:
    book = with_x(1)
    assert book.lookup(("x", "pooled")) is None
    known = book.lookup(X)
    assert known is not None
    assert (known.shape, known.dtype, known.num_tokens, known.grid) == ((3, 2), "float32", 3, (1, 2, 6))
    book.evicted(0, [X])
    assert book.lookup(X) is known, "another replica cannot drop it"
    book.evicted(1, [X])
    assert book.lookup(X) is None


def test_a_result_that_was_not_kept_is_not_held() -> None:
    book = ledger()
    book.submit([job(1, "x")], 0.0)
    book.completed(0, 1)
    assert book.lookup(X) is None


def test_several_replicas_may_hold_it() -> None:
    book = with_x_at_both()
    known = book.lookup(X)
    assert known is not None and known.replicas == (0, 1)
    book.replica_lost(1, (), 0.0)
    known = book.lookup(X)
    assert known is not None and known.replicas == (0,)
    book.replica_lost(0, (), 0.0)
    assert book.lookup(X) is None


def test_with_its_digest_alone_an_item_goes_to_its_holder() -> None:
    for holder in (0, 1):
        book = with_x(holder)
        book.submit([job(1, "a", cost_tokens=20), job(2, "b", cost_tokens=20)], 0.0)
        assert placed(book.submit([held(3), held(4)], 0.0)) == {holder: (3, 4)}
        assert book.joined == 0
        assert book.completed(holder, 3, KEPT) == [Deliver((3,), holder)]


def test_what_nobody_holds_is_not_found_at_once_and_the_others_of_its_request_go_on() -> None:
    book = with_x(0, window_items=1)
    book.submit([job(1, "a"), job(2, "b"), job(3, "c")], 0.0)  # 3 waits
    commands = book.submit([held(4, "unknown"), held(5), job(6, "d")], 0.0)
    assert failures(commands) == {4: ErrorCode.NOT_FOUND}
    assert book.num_items == 5


def test_the_output_is_part_of_it() -> None:
    book = with_x()
    assert failures(book.submit([held(1, output="pooled")], 0.0)) == {1: ErrorCode.NOT_FOUND}


def test_dropped_between_lookup_and_use() -> None:
    book = with_x(0)
    assert placed(book.submit([held(1)], 0.0)) == {0: (1,)}
    commands = book.failed(0, 1, EncoderError(ErrorCode.NOT_FOUND, "gone"))
    assert failures(commands) == {1: ErrorCode.NOT_FOUND}
    assert book.lookup(X) is None
    assert placed(book.submit([job(2, "x")], 0.0)) != {}, "with its bytes it is encoded anew"


def test_another_holder_is_asked_then() -> None:
    book = with_x_at_both(window_items=1)
    (where,) = placed(book.submit([held(1)], 0.0))
    assert placed(book.failed(where, 1, EncoderError(ErrorCode.NOT_FOUND, "gone"))) == {1 - where: (1,)}


def test_it_waits_for_its_holder_and_others_pass_it() -> None:
    book = with_x(0, window_items=1)
    book.replica_away(0)
    assert book.submit([held(2)], 0.0) == []
    assert placed(book.submit([job(3, "b")], 0.0)) == {1: (3,)}
    assert failures(book.evicted(0, [X])) == {2: ErrorCode.NOT_FOUND}, "it would wait in vain"


def test_with_its_holder_it_is_lost() -> None:
    book = with_x(0)
    book.submit([held(1)], 0.0)
    assert failures(book.replica_lost(0, (), 0.0)) == {1: ErrorCode.NOT_FOUND}
    assert book.num_jobs == 0


def test_it_convicts_nobody_and_acquits_nobody() -> None:
    book = with_x(1)
    book.submit([held(1), job(2, "b", cost_tokens=30)], 0.0)
    book.replica_lost(1, None, 0.0)
    book.replica_ready(1)
    commands = book.submit([job(3, "x")], 0.0)
    (send,) = [command for command in commands if isinstance(command, Send)]
    assert send.alone == (False,), "nobody read its bytes when the worker died"
    book = with_x(0)
    book.submit([job(1, "x", output="pooled")], 0.0)
    book.replica_lost(0, (1,), 0.0)
    book.replica_ready(0)  # 1 is tried again, alone
    assert failures(book.submit([held(2)], 0.0)) == {2: ErrorCode.NOT_FOUND}
    assert failures(book.replica_lost(0, (1,), 0.0)) == {}


def test_it_can_be_cancelled_and_its_time_can_be_over() -> None:
    book = with_x(0)
    book.replica_away(0)
    book.submit([held(2, deadline=5.0), held(3)], 0.0)
    assert failures(book.tick(5.0)) == {2: ErrorCode.DEADLINE_EXCEEDED}
    assert book.cancel([3]) == []
    book.replica_ready(0)
    book.submit([held(4)], 0.0)
    assert book.cancel([4]) == [Withdraw(0, (4,))]
    assert book.completed(0, 4, KEPT) == []
    assert book.num_jobs == 0


def test_no_bytes_no_join() -> None:
    """A caller with the bytes must not depend on one without, nor the other way round."""
    book = with_x(0, window_items=1)
    book.submit([job(1, "a"), job(2, "b")], 0.0)
    assert placed(book.submit([job(3, "x"), held(4), job(5, "x")], 0.0)) == {0: (3, 4)}
    assert book.joined == 1
    assert book.completed(0, 4, KEPT) == [Deliver((4,), 0)]
    assert book.completed(0, 3, KEPT) == [Deliver((3, 5), 0)]


@pytest.mark.parametrize("known", [0, 1])
def test_without_room_in_the_directory(known: int) -> None:
    book = ledger(known=known)
    book.submit([job(1, "x")], 0.0)
    book.completed(0, 1, KEPT)
    book.submit([job(2, "y")], 0.0)
    book.completed(1, 2, KEPT)
    assert book.lookup(X) is None
    assert (book.lookup(("y", "tokens")) is None) == (known == 0)
