"""Grid laws of the layout for every (dp, tp)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.distributed.layout import Layout

layouts = st.builds(Layout, dp_size=st.integers(1, 20), tp_size=st.integers(1, 20))


@given(layouts)
def test_ranks_are_partitioned_into_replicas(layout: Layout) -> None:
    ranks = [rank for replica in layout.replicas for rank in layout.ranks_of(replica)]
    assert ranks == list(range(layout.world_size))
    assert layout.world_size == layout.dp_size * layout.tp_size
    assert all(len(layout.ranks_of(replica)) == layout.tp_size for replica in layout.replicas)


@given(layouts)
def test_coordinates_are_the_inverse_of_ranks_of(layout: Layout) -> None:
    for replica in layout.replicas:
        for tp_rank, rank in enumerate(layout.ranks_of(replica)):
            assert layout.coordinates(rank) == (replica, tp_rank)


@given(layouts)
def test_each_replica_has_one_leader_and_the_rest_follow(layout: Layout) -> None:
    for replica in layout.replicas:
        leaders = [rank for rank in layout.ranks_of(replica) if layout.is_leader(rank)]
        assert leaders == [layout.leader_of(replica)]
        assert layout.coordinates(leaders[0]) == (replica, 0)
        assert [*leaders, *layout.followers_of(replica)] == list(layout.ranks_of(replica))


@given(layouts, st.integers(-50, 500))
def test_a_rank_outside_the_world_has_no_place(layout: Layout, rank: int) -> None:
    if 0 <= rank < layout.world_size:
        layout.coordinates(rank)
    else:
        with pytest.raises(ValueError, match=str(rank)):
            layout.coordinates(rank)


@given(layouts, st.data())
def test_the_lowest_leader_of_any_node(layout: Layout, data: st.DataObject) -> None:
    node = data.draw(st.lists(st.integers(0, layout.world_size - 1), unique=True))
    leaders = {layout.leader_of(replica) for replica in layout.replicas} & set(node)
    assert layout.lowest_leader(node) == (min(leaders) if leaders else None)
