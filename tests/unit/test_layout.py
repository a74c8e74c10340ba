"""Layouts that people start, spelled out."""

from __future__ import annotations

from spmd_encoder.distributed.layout import Layout


def test_a_world_of_one() -> None:
    layout = Layout(1, 1)
    assert layout.coordinates(0) == (0, 0)
    assert list(layout.followers_of(0)) == []
    assert layout.lowest_leader([0]) == 0


def test_neighbours_share_a_replica() -> None:
    layout = Layout(dp_size=2, tp_size=4)
    assert [layout.coordinates(rank) for rank in (0, 3, 4, 7)] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert [layout.leader_of(replica) for replica in layout.replicas] == [0, 4]
    assert list(layout.followers_of(1)) == [5, 6, 7]


def test_a_node_in_the_middle_of_a_replica_has_no_leader() -> None:
    layout = Layout(dp_size=1, tp_size=4)
    assert layout.lowest_leader([2, 3]) is None
    assert layout.lowest_leader([1, 0]) == 0
    assert Layout(4, 1).lowest_leader([3, 2]) == 2
