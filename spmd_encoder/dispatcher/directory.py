"""Which replicas hold which results in their caches, as far as the dispatcher knows. Pure.

A result is held where it was encoded, and equal items go there again, so that no two replicas cache the same things:
what consistent hashing is for elsewhere, without its uneven load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from spmd_encoder.api.types import HeldResult
from spmd_encoder.dispatcher.commands import Key


class Directory:
    """At most `capacity` results; 0 where replicas hold none."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[Key, HeldResult] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> HeldResult | None:
        return self._held.get(key)

    def holders(self, key: Key) -> tuple[int, ...]:
        """The replicas that hold the result, the last to give it at the end."""
        held = self._held.get(key)
        return () if held is None else held.replicas

    def learn(self, key: Key, replica: int, result: HeldResult) -> list[Key]:
        """The replica has just given this result, and keeps it. The keys of which something else is known now."""
        if not self._capacity:
            return []
        others = tuple(holder for holder in self.holders(key) if holder != replica)
        self._held[key] = replace(result, replicas=(*others, replica))
        self._held.move_to_end(key)
        if len(self._held) > self._capacity:
            return [key, self._held.popitem(last=False)[0]]
        return [key]

    def forget(self, keys: Iterable[Key], replica: int) -> None:
        """The replica holds these no more."""
        for key in keys:
            held = self._held.get(key)
            if held is None or replica not in held.replicas:
                continue
            if left := tuple(holder for holder in held.replicas if holder != replica):
                self._held[key] = replace(held, replicas=left)
            else:
                del self._held[key]

    def forget_replica(self, replica: int) -> None:
        """Its memory is gone."""
        self.forget([key for key, held in self._held.items() if replica in held.replicas], replica)
