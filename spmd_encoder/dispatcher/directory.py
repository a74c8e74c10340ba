"""Which replica holds which result in its cache, as far as the dispatcher knows. Pure.

A result is held where it was encoded, so equal items go there again, and no two replicas cache the same things: what
consistent hashing is for elsewhere, without its uneven load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from spmd_encoder.dispatcher.commands import Key


class Directory:
    """At most `capacity` results; 0 where replicas hold none."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, key: Key) -> int | None:
        return self._homes.get(key)

    def learn(self, key: Key, replica: int) -> None:
        """The replica has just given this result."""
        if not self._capacity:
            return
        self._homes[key] = replica
        self._homes.move_to_end(key)
        if len(self._homes) > self._capacity:
            self._homes.popitem(last=False)

    def forget(self, keys: Iterable[Key], replica: int) -> None:
        """The replica holds these no more."""
        for key in keys:
            if self._homes.get(key) == replica:
                del self._homes[key]

    def forget_replica(self, replica: int) -> None:
        """Its memory is gone."""
        self.forget([key for key, home in self._homes.items() if home == replica], replica)
