"""Which inputs may have killed workers: the ledger's memory of digests. Pure; times are the caller's clock in seconds.

- **suspect**: was being worked on when a worker died. One copy at a time in the whole world, and alone in its batch.
- **refused**: was suspect, alone, and a worker died again. So a poison costs two deaths in the world, and workers that
  die together of another cause convict nobody.
"""

from __future__ import annotations


class Suspicion:
    def __init__(self, quarantine_s: float) -> None:
        self.quarantine_s = quarantine_s
        self._suspect_until: dict[str, float] = {}
        self._refused_until: dict[str, float] = {}

    def is_suspect(self, digest: str) -> bool:
        return digest in self._suspect_until

    def is_refused(self, digest: str, now: float) -> bool:
        return self._refused_until.get(digest, now) > now

    def answered(self, digest: str) -> None:
        """A worker got through with it."""
        self._suspect_until.pop(digest, None)

    def died(self, digest: str, now: float, *, alone: bool) -> None:
        """A worker died while it was at it; `alone`: nothing else was in its hands."""
        if alone and self._suspect_until.pop(digest, None) is not None:
            self._refused_until[digest] = now + self.quarantine_s
        else:
            self._suspect_until[digest] = now + self.quarantine_s

    def tick(self, now: float) -> None:
        """Forget what is long ago."""
        for book in (self._suspect_until, self._refused_until):
            for digest in [d for d, until in book.items() if until <= now]:
                del book[digest]
