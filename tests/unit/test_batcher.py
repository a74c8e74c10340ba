"""The batcher's rules one by one; `tests/property/test_batcher.py` mixes them."""

from __future__ import annotations

import pytest

from spmd_encoder.scheduler.batcher import Batcher, Stage


def batcher(*, items: int = 3, tokens: int = 10, lookahead: int = 6) -> Batcher:
    return Batcher(max_items=items, max_tokens=tokens, lookahead=lookahead)


def ready(box: Batcher, *jobs: tuple[int, str, int]) -> None:
    for job_id, _, _ in jobs:
        box.add(job_id, alone=False)
    for job_id, key, cost in jobs:
        assert box.next_to_prepare() == job_id
        assert box.prepared(job_id, key=key, cost=cost)


def test_limits_of_items_and_tokens() -> None:
    box = batcher()
    ready(box, (1, "k", 4), (2, "k", 7), (3, "k", 6), (4, "k", 1))
    assert box.next_batch() == [1, 3]
    assert box.next_batch() == [2, 4]
    assert box.next_batch() == []
    box = batcher()
    ready(box, *((n, "k", 1) for n in range(5)))
    assert box.next_batch() == [0, 1, 2]


def test_one_larger_item_runs_alone() -> None:
    box = batcher()
    ready(box, (1, "k", 99), (2, "k", 1))
    assert box.next_batch() == [1]
    assert box.next_batch() == [2]


def test_what_is_forming_and_whether_one_more_like_it_has_room() -> None:
    box = batcher(items=3, tokens=10)
    assert box.forming() == (0, 0, True)
    ready(box, (1, "k", 4))
    assert box.forming() == (1, 4, True)
    ready(box, (2, "k", 4))
    assert box.forming() == (2, 8, False), "12 tokens are too many"
    ready(box, (3, "k", 1))
    assert box.forming() == (3, 9, False)
    assert box.next_batch() == [1, 2, 3]
    assert box.forming() == (0, 0, True)
    ready(box, (4, "k", 99))
    assert box.forming() == (1, 99, False)


def test_keys_do_not_mix_and_the_oldest_leads() -> None:
    box = batcher()
    ready(box, (1, "a", 1), (2, "b", 1), (3, "a", 1))
    assert box.next_batch() == [1, 3]
    assert box.next_batch() == [2]


def test_lookahead_counts_what_does_not_run() -> None:
    box = batcher(lookahead=2)
    for job_id in range(4):
        box.add(job_id, alone=False)
    assert [box.next_to_prepare() for _ in range(3)] == [0, 1, None]
    box.prepared(0, key="k", cost=1)
    assert box.next_to_prepare() is None
    assert box.next_batch() == [0]
    assert box.next_to_prepare() == 2


def test_alone_waits_for_the_rest_and_the_rest_for_it() -> None:
    box = batcher()
    for job_id in (1, 2, 3):
        box.add(job_id, alone=job_id == 2)
    assert box.next_to_prepare() == 1
    assert box.next_to_prepare() is None
    box.prepared(1, key="k", cost=1)
    assert box.next_batch() == [1]
    assert box.next_to_prepare() is None, "1 still runs"
    box.finished([1])
    assert box.next_to_prepare() == 2
    assert box.next_to_prepare() is None
    box.prepared(2, key="k", cost=1)
    assert box.next_to_prepare() is None
    assert box.next_batch() == [2]
    assert box.next_to_prepare() is None
    box.finished([2])
    assert box.next_to_prepare() == 3


def test_remove_at_each_stage() -> None:
    box = batcher()
    assert not box.remove(1)
    box.add(1, alone=False)
    assert box.remove(1)
    box.add(1, alone=True)
    assert box.next_to_prepare() == 1
    assert box.remove(1)
    assert not box.prepared(1, key="k", cost=1), "it was removed meanwhile"
    ready(box, (2, "k", 1), (3, "k", 1))
    assert box.remove(2)
    assert box.next_batch() == [3]
    assert not box.remove(3), "what runs runs to its end"
    assert box.stage(3) is Stage.RUNNING
    assert (box.waiting, box.running) == (0, 1)
    box.finished([3])
    assert box.stage(3) is None
    assert (box.waiting, box.running) == (0, 0)


def test_no_job_twice() -> None:
    box = batcher()
    box.add(1, alone=False)
    with pytest.raises(ValueError, match="1"):
        box.add(1, alone=False)
