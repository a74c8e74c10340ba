"""Which replica gets an item."""

from __future__ import annotations

from spmd_encoder.dispatcher.routing import POLICIES, Load, least_tokens


def test_the_fewest_tokens_win_whatever_the_items() -> None:
    loads = {0: Load(10, 1), 1: Load(9, 50), 2: Load(11, 0)}
    assert {least_tokens([0, 1, 2], loads, turn) for turn in range(6)} == {1}


def test_equals_take_turns() -> None:
    loads = {0: Load(5, 1), 1: Load(5, 2), 2: Load(6, 0), 3: Load(5, 0)}
    assert [least_tokens([0, 1, 2, 3], loads, turn) for turn in range(6)] == [0, 1, 3, 0, 1, 3]


def test_only_candidates_are_chosen() -> None:
    loads = {0: Load(0, 0), 1: Load(100, 9)}
    assert least_tokens([1], loads, 0) == 1


def test_the_table_names_it() -> None:
    assert POLICIES["least-tokens"] is least_tokens
