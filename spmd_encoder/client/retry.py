"""When a request is sent again, and after how long: pure arithmetic."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

RETRYABLE_STATUSES = frozenset({429, 503})

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LONGEST_RETRY_AFTER_S = 30.0
_ROUNDED_TO_S = 1.0
_LAST_PAUSE_S = 0.2
# A request that breaks its connection each time may be what breaks it.
_MOST_BREAKS = 5


@dataclass
class RetryPolicy:
    """Further attempts, all of them and their pauses before `deadline` (monotonic seconds).

    With `retries` at most so many. Without, time alone bounds them, as a server that starts anew takes its time; but
    connections that were made and then broke are counted.
    """

    retries: int | None
    deadline: float
    rng: random.Random
    used: int = 0
    breaks: int = 0

    def pause_s(self, now: float, retry_after_s: float | None, *, broke: bool = False) -> float | None:
        """How long to wait before the next attempt, or None where there shall be none. `broke`: the connection did.

        The server's wish is a lower bound, capped, with jitter so that refused clients do not come back together: a
        quarter of it, or the second that servers round wishes up to, at most as much as the wish; without one the
        pauses double, each drawn from its upper half, and none is longer than half of what is left.
        """
        self.breaks += broke
        if self.breaks > _MOST_BREAKS if self.retries is None else self.used >= self.retries:
            return None
        if retry_after_s is not None:
            least = min(retry_after_s, _LONGEST_RETRY_AFTER_S)
            pause = least + self.rng.uniform(0.0, max(least / 4, min(least, _ROUNDED_TO_S)))
        else:
            pause = min(_FIRST_PAUSE_S * 2.0**self.used, _LONGEST_PAUSE_S) * self.rng.uniform(0.5, 1.0)
            if (left := self.deadline - now) >= _LAST_PAUSE_S:
                pause = min(pause, left / 2)  # a server that comes back in time is asked once more
        if now + pause >= self.deadline:
            return None
        self.used += 1
        return pause


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """`Retry-After` in seconds, given as seconds or as a date (RFC 9110, 10.2.3); None where absent or senseless."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:  # "-0000", or no zone at all
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
