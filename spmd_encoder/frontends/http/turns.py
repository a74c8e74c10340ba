"""Who waits before the application is asked: many requests at once must not keep the event loop from the few that ask
how it is, or that register a receiver."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

# Begun in one turn of the event loop: some 2 ms each of parsing and admission, while everything else waits.
_AT_ONCE = 8
_HEAVY = frozenset({"/v1/encode", "/v1/embeddings", "/encode"})


class Turns:
    """Of one server and event loop. Requests that bring media are begun in the order of their coming, a few in each
    turn of the loop; all others at once."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._is_going = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @staticmethod
    def waits(path: str) -> bool:
        return path in _HEAVY

    def wait(self, begin: Callable[[], None]) -> None:
        """Call `begin` when it is its turn."""
        self._waiting.append(begin)
        if not self._is_going:
            self._is_going = True
            asyncio.get_running_loop().call_soon(self._go)

    def _go(self) -> None:
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        self._is_going = bool(self._waiting)
        if self._is_going:
            asyncio.get_running_loop().call_soon(self._go)
