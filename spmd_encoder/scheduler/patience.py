"""How long a free tower waits for an item that is nearly prepared: pure, the caller tells the time.

A forward over items of cost x takes about a + b x seconds. With k items at hand, and one more of cost c that is
prepared in w seconds, the k + 1 of them wait less altogether when the tower waits, if

    (k + 1) (w + b c) < a + b c

(begin now: k items are done after f, the next one after f + a + b c, where f is the forward of the k; wait: all are
done after w + f + b c). So a lone item never waits, nor does any item where a forward costs its items and no more.
a and b are learned from the forwards that were, w from how fast items have been prepared lately. What is prepared and
does not join those at hand, because it failed or is of another kind, gives no reason to wait any longer.
"""

from __future__ import annotations

_KEEP = 0.98
"""Of a forward's weight in a and b when the next one has been."""
_GAP_NEW = 0.2
"""Weight of the last time between two prepared items in their mean."""
_FLAT = 1e-3
"""Costs that vary less than this share of their mean square tell nothing of b, which then counts as 0."""
_LATE = 2.0
"""An item that is not there after so many times the mean is not nearly prepared: nobody knows when it comes."""


class Patience:
    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0
        self._gap_s: float | None = None
        self._items = 0
        self._joined_at = 0.0
        self._weight = self._cost = self._seconds = self._cost_cost = self._cost_seconds = 0.0

    def preparation_began(self, now: float) -> None:
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def preparation_ended(self, now: float) -> None:
        """However it ended."""
        gap = now - self._since
        self._gap_s = gap if self._gap_s is None else self._gap_s + _GAP_NEW * (gap - self._gap_s)
        self._since = now
        self._under_way -= 1

    def forward_ended(self, cost: int, seconds: float) -> None:
        """A forward of so many tokens took so long; one that took no time at all was none, its items failed."""
        self._items = 0
        if seconds <= 0.0:
            return
        self._weight = _KEEP * self._weight + 1.0
        self._cost = _KEEP * self._cost + cost
        self._seconds = _KEEP * self._seconds + seconds
        self._cost_cost = _KEEP * self._cost_cost + cost * cost
        self._cost_seconds = _KEEP * self._cost_seconds + cost * seconds

    def wait_s(self, now: float, *, items: int, cost: int) -> float:
        """At most so long, with so many items at hand, of so many tokens together; 0.0 is not at all."""
        if items > self._items:
            self._items, self._joined_at = items, now
        wait_s = self._worth_s(now, items, cost)
        if not wait_s:
            self._items = 0
        return wait_s

    def _worth_s(self, now: float, items: int, cost: int) -> float:
        if not self._under_way or not self._weight or self._gap_s is None:
            return 0.0
        fixed_s, token_s = self._forward()
        more_s = token_s * cost / items
        worth_s = (fixed_s + more_s) / (items + 1) - more_s
        waited_s = now - min(self._since, self._joined_at)
        if self._gap_s - waited_s >= worth_s:
            return 0.0
        return max(0.0, min(worth_s, _LATE * self._gap_s - waited_s))

    def _forward(self) -> tuple[float, float]:
        """a in seconds and b in seconds per token, by least squares; neither is negative."""
        cost, seconds = self._cost / self._weight, self._seconds / self._weight
        square = self._cost_cost / self._weight
        spread = square - cost * cost
        if spread <= _FLAT * square:
            return seconds, 0.0
        slope = (self._cost_seconds / self._weight - cost * seconds) / spread
        slope = min(max(0.0, slope), seconds / cost)
        return seconds - slope * cost, slope
