"""A budget of bytes of finished embeddings: those that wait for receivers, and those on their way to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spmd_encoder.errors import EncoderError, ErrorCode


class StagedBytes:
    """One for all transports and protocols of a server. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def check_room(self) -> None:
        """Raises `EncoderError` OVERLOADED where nothing more should be begun."""
        if self.used >= self._limit:
            raise self._full()

    @contextlib.contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Raises `EncoderError` OVERLOADED. One parcel above the limit may pass when it is alone."""
        if self.used and self.used + num_bytes > self._limit:
            raise self._full()
        self.used += num_bytes
        try:
            yield
        finally:
            self.used -= num_bytes

    def _full(self) -> EncoderError:
        return EncoderError(
            ErrorCode.OVERLOADED,
            f"{self.used} bytes of embeddings wait for their receivers already, and {self._limit} are the limit "
            "(--max-staged-bytes); try again later",
        )
