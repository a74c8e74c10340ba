"""Works that wait for a holder of their results: found again when what is held changes, and cheap however many wait."""

from __future__ import annotations

from spmd_encoder.dispatcher.commands import Key, NewJob
from spmd_encoder.dispatcher.directory import Directory
from spmd_encoder.dispatcher.hits import WaitingHits
from spmd_encoder.dispatcher.ledger import Ledger
from spmd_encoder.dispatcher.work import Work
from spmd_encoder.errors import ErrorCode
from tests.harness.ledger_book import KEPT, failures, job, ledger, placed


class CountingDirectory(Directory):
    asked = 0

    def holders(self, key: Key) -> tuple[int, ...]:
        self.asked += 1
        return super().holders(key)


def without_bytes(job_id: int, digest: str) -> NewJob:
    return NewJob(job_id=job_id, digest=digest, cost_tokens=1, deadline=1e9, output="tokens", held=True)


def test_thousands_that_wait_cost_those_that_come_and_go_nothing() -> None:
    directory = CountingDirectory(10_000)
    book = Ledger(range(2), max_items=10_000, window_items=1, window_tokens=100, directory=directory)
    for replica in (0, 1):
        book.replica_ready(replica)
    for number in range(2000):
        directory.learn((f"x{number}", "tokens"), 0, KEPT)
    jobs = [(without_bytes if number % 2 else job)(number, f"x{number}") for number in range(2000)]
    assert placed(book.submit(jobs, 0.0)) == {0: (0, 1, 2, 3)}
    directory.asked = 0
    for number in range(100):
        assert placed(book.completed(0, number, KEPT)) == {0: (number + 4,)}
        book.submit([job(5000 + number)], 0.0)
    assert directory.asked < 2000


def test_they_wait_for_room_when_the_last_holder_drops_their_results_and_those_without_bytes_fail() -> None:
    book = ledger(1, items=1, known=10)
    for number in range(6):
        book.submit([job(number, f"x{number}")], 0.0)
        book.completed(0, number, KEPT)
    first = [job(100 + number, f"x{number}") for number in range(4)]
    assert placed(book.submit([*first, job(104, "x4"), without_bytes(105, "x5")], 0.0)) == {0: (100, 101, 102, 103)}
    commands = book.evicted(0, [("x4", "tokens"), ("x5", "tokens")])
    assert failures(commands) == {105: ErrorCode.NOT_FOUND}
    assert placed(commands) == {0: (104,)}
    assert book.waiting_tokens == 0
    for number in range(5):
        book.completed(0, 100 + number)
    assert (book.num_items, book.num_tokens, book.load(0).outstanding_items) == (0, 0, 0)


def test_what_is_forgotten_for_newer_results_is_waited_for_no_more() -> None:
    book = ledger(1, items=1, known=5)
    for number in range(5):
        book.submit([job(number, f"x{number}")], 0.0)
        book.completed(0, number, KEPT)
    book.submit([job(100 + number, f"x{number}") for number in (1, 2, 3, 4)], 0.0)
    assert book.submit([without_bytes(105, "x0")], 0.0) == []
    assert placed(book.submit([job(106, "new")], 0.0)) == {0: (106,)}
    assert failures(book.completed(0, 106, KEPT)) == {105: ErrorCode.NOT_FOUND}, "the oldest of five"


def test_they_are_found_by_all_holders_and_by_none_once_they_are_taken() -> None:
    directory = Directory(10)
    hits = WaitingHits(directory)
    first, second = Work.of(job(1, "x")), Work.of(without_bytes(2, "x"))
    assert not hits.add(first), "nobody holds it"
    assert directory.learn(first.key, 0, KEPT) == [first.key]
    assert hits.add(second)
    assert hits.add(first)
    directory.learn(first.key, 1, KEPT)
    assert (hits.of(0), hits.of(1)) == ([first, second], []), "as it was when they came"
    for work in hits.take([first.key, ("unknown", "tokens")]):
        assert hits.add(work)
    assert hits.of(0) == hits.of(1) == [first, second]
    hits.discard(1)
    hits.discard(1)
    assert hits.of(0) == hits.of(1) == hits.all() == [second]
    assert hits.take([first.key]) == [second]
    assert len(hits) == 0


def test_they_are_no_work_and_tell_no_pace() -> None:
    book = ledger(1, items=1, known=10)
    assert not book.is_encoding
    book.submit([job(1, "x", cost=50)], 0.0)
    assert book.is_encoding
    book.completed(0, 1, KEPT)
    assert (book.is_encoding, book.answered_tokens) == (False, 50)
    book.submit([job(2, "x", cost=50)], 0.0)
    assert (book.is_encoding, book.num_items) == (False, 1)
    book.completed(0, 2, KEPT)
    assert book.answered_tokens == 50


def test_what_was_given_up_and_encoded_all_the_same_is_no_reason_for_the_next_who_wants_it_to_wait() -> None:
    book = ledger(1, items=1, known=10)
    assert placed(book.submit([job(1, "x")], 0.0)) == {0: (1,)}
    book.cancel([1])
    assert placed(book.submit([job(2, "y"), job(3, "z"), job(4, "x")], 0.0)) == {}
    assert placed(book.completed(0, 1, KEPT)) == {0: (2, 4)}
    assert book.load(0).outstanding_items == 2
    book.completed(0, 4, KEPT)
    assert placed(book.completed(0, 2, KEPT)) == {0: (3,)}
    book.completed(0, 3)
    assert (book.num_items, book.num_tokens, book.waiting_tokens) == (0, 0, 0)
