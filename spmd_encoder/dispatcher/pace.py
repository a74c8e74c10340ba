"""How fast the world answers, and so how long it takes until there is room again. Pure; times are the caller's."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
KEPT_S = 60.0
LEAST_S, MOST_S = 1.0, 60.0


class Pace:
    """Encoder tokens encoded over the last `WINDOW_S` in which there was something to do, of the last `KEPT_S`.

    Time without work says nothing of how fast the world is, nor does the time until the first answer after that, in
    which all stages are filled. Nothing is in hand for longer than `most_s`, however slow the first few answers were.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = max(LEAST_S, min(MOST_S, most_s))
        self._answered: deque[tuple[float, float, int]] = deque()
        """(when, seconds since the answer before, tokens)."""
        self._seconds = 0.0
        self._tokens = 0
        self._last: float | None = None
        """The last answer since there is something to do."""

    def begin(self) -> None:
        """Work comes where there was none."""
        self._last = None

    def answered(self, tokens: int, now: float) -> None:
        """None of them where it was no work (a probe's answer, or one out of a cache), which may come at any time."""
        if not tokens:
            return
        if self._last is not None:
            self._answered.append((now, now - self._last, tokens))
            self._seconds += now - self._last
            self._tokens += tokens
            self._forget(now)
        self._last = now

    def wait_s(self, tokens: int, now: float) -> float:
        """Seconds until so many tokens will have been answered at this pace; the least where nothing is known yet."""
        self._forget(now)
        if not self._tokens:
            return LEAST_S
        seconds = self._seconds + (0.0 if self._last is None else now - self._last)
        return min(self._most_s, max(LEAST_S, tokens * seconds / self._tokens))

    def _forget(self, now: float) -> None:
        while self._answered:
            when, seconds, tokens = self._answered[0]
            if now - when <= KEPT_S and self._seconds - seconds < WINDOW_S:
                return
            self._answered.popleft()
            self._seconds -= seconds
            self._tokens -= tokens
        self._seconds = 0.0  # what rounding has left
