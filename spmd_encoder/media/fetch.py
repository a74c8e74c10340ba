"""Fetching media by URL, within limits and only from where the configuration allows."""

from __future__ import annotations

import re
from collections.abc import Callable

from spmd_encoder.config import MediaConfig
from spmd_encoder.errors import EncoderError, ErrorCode

_REMOTE = re.compile(r"(?:https?|file)://", re.IGNORECASE)


def is_remote(text: str) -> bool:
    """Whether an item is a URL that `MediaFetcher.fetch` takes: http, https or file, in any case."""
    return _REMOTE.match(text) is not None


class MediaFetcher:
    """Fetches one URL at a time for each caller, a bounded number at once; one per process."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config

    async def fetch(self, url: str, *, reserve: Callable[[int], None]) -> bytes:
        """The bytes behind `url`.

        `reserve(n)` is called in the event loop as n more bytes arrive, before they are kept; what it raises ends the
        fetch and is passed on. Raises `EncoderError`: INVALID_REQUEST (malformed), FETCH_FORBIDDEN, FETCH_FAILED (a
        fetch that ran out of time too), TOO_LARGE, or DRAINING after `close`. Cancelling it closes its connection.
        """
        raise EncoderError(ErrorCode.FETCH_FAILED, "URLs are not fetched yet")

    async def close(self) -> None:
        """End all fetches; they raise DRAINING. May be called again."""
