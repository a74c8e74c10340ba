"""Whether this process itself stood still: stopped, frozen with its container, or starved of the CPU."""

from __future__ import annotations

import time

SLACK_S = 1.0


class Stillness:
    """Asked every `period_s` by a loop: what lies beyond is time in which nobody could have shown us a sign of life."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._before = time.monotonic()

    def gap_s(self) -> float:
        """Seconds that this process may have stood still since it was last asked; 0 where it was only a little late.

        It stopped somewhere within a period: all of it counts, so that nobody is blamed for the rest.
        """
        now = time.monotonic()
        gap_s, self._before = now - self._before, now
        return gap_s if gap_s > self._period_s + SLACK_S else 0.0
