"""Items that cost a decoder process: refused for a while, so that nobody pays for them twice. Pure; times are the
caller's clock in seconds."""

from __future__ import annotations

from collections import OrderedDict

KEPT_S = 600.0
MOST_KEPT = 1024


class Refusals:
    """The last `MOST_KEPT` digests, each with the reason that its next senders are told, for `KEPT_S`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, digest: str, reason: str, now: float) -> None:
        self._entries[digest] = (reason, now + KEPT_S)
        self._entries.move_to_end(digest)
        if len(self._entries) > MOST_KEPT:
            self._entries.popitem(last=False)

    def reason(self, digest: str, now: float) -> str | None:
        """Why the item is not tried, or None where it may be."""
        reason, until = self._entries.get(digest, ("", now))
        if until > now:
            return reason
        self._entries.pop(digest, None)
        return None
