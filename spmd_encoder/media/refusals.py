"""Items that cost a decoder process: refused for a while, so that nobody pays for them twice. Pure; times are the
caller's clock in seconds."""

from __future__ import annotations

from collections import OrderedDict

KEPT_S = 600.0
MOST_KEPT = 1024


class Refusals:
    """The last `MOST_KEPT` items by their keys (`api.types.item_key`), each with the reason that its next senders are
    told, for `KEPT_S`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, reason: str, now: float) -> None:
        self._entries[key] = (reason, now + KEPT_S)
        self._entries.move_to_end(key)
        if len(self._entries) > MOST_KEPT:
            self._entries.popitem(last=False)

    def reason(self, key: str, now: float) -> str | None:
        """Why the item is not tried, or None where it may be."""
        reason, until = self._entries.get(key, ("", now))
        if until > now:
            return reason
        self._entries.pop(key, None)
        return None
