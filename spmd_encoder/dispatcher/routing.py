"""Which replica gets an item: pure functions in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What a replica has in hand. Only encodes count, never control messages."""

    outstanding_tokens: int
    outstanding_items: int


Policy = Callable[[Sequence[int], Mapping[int, Load], int], int]
"""(replicas that may take it, their loads, how many items were routed before) -> replica."""


def least_tokens(candidates: Sequence[int], loads: Mapping[int, Load], turn: int) -> int:
    """The one with the fewest outstanding tokens; round robin among equals."""
    fewest = min(loads[replica].outstanding_tokens for replica in candidates)
    tied = [replica for replica in candidates if loads[replica].outstanding_tokens == fewest]
    return tied[turn % len(tied)]


POLICIES: dict[str, Policy] = {"least-tokens": least_tokens}
