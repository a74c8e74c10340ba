"""How items are shared out to ranks that hold whole weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.worker.spread import share_out


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 8))
def test_every_item_has_one_rank_and_none_waits_for_much(costs: list[int], ranks: int) -> None:
    shares = share_out(costs, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(costs)))
    loads = [sum(costs[index] for index in share) for share in shares]
    # Graham's bound for the longest processing time first.
    least = max([sum(costs) / ranks, *costs], default=0)
    assert max(loads) <= (4 / 3) * least + max(costs, default=0) / 3
    assert (len(shares[0]) > 0) == bool(costs), "the leader has work where anybody has"


def test_fewer_items_than_ranks_leave_ranks_without() -> None:
    assert share_out([7], 3) == [[0], [], []]
    assert share_out([1, 9], 3) == [[1], [0], []]
    assert share_out([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]
