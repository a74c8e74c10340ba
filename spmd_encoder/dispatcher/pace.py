"""How fast the world answers, and so how long it takes until there is room again. Pure; times are the caller's."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
LEAST_S, MOST_S = 1.0, 60.0


class Pace:
    """Encoder tokens answered over the last seconds in which there was something to do.

    Time without work says nothing of how fast the world is: a busy time knows nothing of those before it. Nor does the
    time until its first answer, in which all stages are filled: pace counts from that. Nothing is in hand for longer
    than `most_s`, however slow the first few answers were.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = max(LEAST_S, min(MOST_S, most_s))
        self._answered: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._began: float | None = None
        """When the first answer of this busy time came."""

    def begin(self) -> None:
        """Work comes where there was none."""
        self._answered.clear()
        self._tokens = 0
        self._began = None

    def answered(self, tokens: int, now: float) -> None:
        if self._began is None:
            self._began = now
            return
        self._answered.append((now, tokens))
        self._tokens += tokens
        self._forget(now)

    def wait_s(self, tokens: int, now: float) -> float:
        """Seconds until so many tokens will have been answered at this pace; the least where nothing is known yet."""
        self._forget(now)
        if not self._tokens or self._began is None:
            return LEAST_S
        elapsed_s = min(WINDOW_S, now - self._began)
        return min(self._most_s, max(LEAST_S, tokens * elapsed_s / self._tokens))

    def _forget(self, now: float) -> None:
        while self._answered and now - self._answered[0][0] > WINDOW_S:
            self._tokens -= self._answered.popleft()[1]
