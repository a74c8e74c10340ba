"""How many requests a client has at a server that refuses some, and who is next. No I/O, no clock."""

from __future__ import annotations

import itertools
import math
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Callable

_FIRST = 64
"""At the beginning, when nothing is known of the server. It keeps all but the widest busy from the first moment."""
_KEPT = 0.9
"""Of what the server has in hand when it refuses more: clients that share it come to equal shares by such cuts."""


class Gate:
    """Of one client, for all of its threads or coroutines.

    The first `_FIRST` go at once, and each answer makes room for one more. When the server refuses one, the number
    falls to a tenth less than those that it kept. From there it grows by one in as many answers, and faster only up
    to half of what was too many. So of a burst little is refused, and once, instead of all that comes back each time.
    Where all were refused, or the server cannot be reached, one goes at a time, when the last refused one's pause is
    over.

    Those that came first go first, also when they were refused in between.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # Reentrant, as a turn may be left by the garbage collector, wherever it runs.
        self._lock = threading.RLock()
        self._going: set[Turn] = set()
        self._waiting: list[Turn] = []
        """In order of their numbers."""
        self._most = float(_FIRST)
        self._known = math.inf
        """Up to here `_most` grows by one with each answer."""
        self._cuts = 0
        self.why = ""
        self._shut_by: Turn | None = None
        """Nobody goes until this one, which was refused with nothing else under way, comes back or leaves."""

    def turn(self) -> Turn:
        """For a request that comes now. In a process forked from ours what others did there is none of ours."""
        if self._pid != os.getpid():
            self._reset()
        return Turn(self, next(self._numbers))

    def ask(self, turn: Turn) -> bool:
        """Whether it goes now; if not, its `wake` is called when it does."""
        with self._lock:
            if self._shut_by is turn:
                self._shut_by = None
            insort(self._waiting, turn)
            self._give()
            return turn in self._going

    def answered(self, turn: Turn) -> None:
        with self._lock:
            was_full = len(self._going) + 1 > self._most
            self._going.discard(turn)
            if was_full:
                self._most += 1.0 if self._most < self._known else 1.0 / self._most
            self._give()

    def refused(self, turn: Turn, why: str) -> None:
        with self._lock:
            self.why = why
            self._going.discard(turn)
            left = len(self._going)
            # Of those that went before the last cut one does not say that it was too small. One alone says nothing.
            if turn.cuts == self._cuts and left:
                self._cuts += 1
                self._known = left / 2
                self._most = _KEPT * min(self._most, left)
            self._most = max(1.0, min(self._most, left))
            if not left:
                self._shut_by = turn
            self._give()

    def leave(self, turn: Turn) -> None:
        """Its request is over, whatever it was doing."""
        with self._lock:
            self._going.discard(turn)
            place = bisect_left(self._waiting, turn)
            if place < len(self._waiting) and self._waiting[place] is turn:
                del self._waiting[place]
            if self._shut_by is turn:
                self._shut_by = None
            self._give()

    def is_going(self, turn: Turn) -> bool:
        return turn in self._going

    def _give(self) -> None:
        while self._waiting and self._shut_by is None and len(self._going) + 1 <= self._most:
            turn = self._waiting.pop(0)
            self._going.add(turn)
            turn.cuts = self._cuts
            turn.wake()


class Turn:
    """A request's place. Leave it by `with`, in whatever way the request ends."""

    def __init__(self, gate: Gate, number: int) -> None:
        self._gate = gate
        self._number = number
        self.cuts = 0
        """The gate's cuts when it last went."""
        self.wake: Callable[[], None] = _nobody
        """Called when the turn is given. Who sets it looks at `is_given` then, as that may have been meanwhile."""

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.leave(self)

    def __lt__(self, other: Turn) -> bool:
        return self._number < other._number

    def ask(self) -> bool:
        """Whether the request may be sent now; if not, it waits from now on."""
        return self._gate.ask(self)

    @property
    def is_given(self) -> bool:
        return self._gate.is_going(self)

    @property
    def why(self) -> str:
        """Why the last request that was refused, whose ever, was."""
        return self._gate.why

    def end(self, refused: str | None) -> None:
        """An attempt is over. `refused`: why the server took it not, or that it was not there."""
        if refused is not None:
            self._gate.refused(self, refused)
        else:
            self._gate.answered(self)


def _nobody() -> None:
    """Nobody waits yet."""
