"""Embeddings that wait here until they are fetched: each under an id that nobody can guess, within bytes and time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from spmd_encoder.api.types import Embedding
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import ItemParcel
from spmd_encoder.transports.budget import StagedBytes

# A vector of a few bytes takes more than those.
_LEAST_BYTES = 4096


@dataclass(eq=False)
class _Place:
    embedding: Embedding
    expiry: asyncio.TimerHandle
    held: ExitStack = field(default_factory=ExitStack)
    readers: int = 0
    is_released: bool = False

    def let_go(self) -> None:
        if self.is_released and not self.readers:
            self.held.close()


class Shelf:
    """A `Transport` of single items to ids. Belongs to one event loop. An embedding is kept for `keep_s` seconds."""

    def __init__(self, budget: StagedBytes, *, keep_s: float) -> None:
        self._budget = budget
        self._keep_s = keep_s
        self._places: dict[str, _Place] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._places)

    @staticmethod
    def new_id() -> str:
        """32 characters of letters, digits, `-` and `_`: 192 random bits."""
        return secrets.token_urlsafe(24)

    async def deliver(self, parcel: ItemParcel, destination: str) -> None:
        """Keep the parcel's rows; one without rows is nothing to keep.

        Raises `EncoderError` OVERLOADED where there is no room, DELIVERY_FAILED after `close`.
        """
        if not isinstance(parcel.outcome, Embedding):
            return
        if self._closed:
            raise EncoderError(ErrorCode.DELIVERY_FAILED, "the embedding cannot be staged: the server is ending")
        assert destination not in self._places
        held = ExitStack()
        held.enter_context(self._budget.hold(max(parcel.num_bytes, _LEAST_BYTES)))
        expiry = asyncio.get_running_loop().call_later(self._keep_s, self.release, destination)
        self._places[destination] = _Place(parcel.outcome, expiry, held)

    @contextmanager
    def reading(self, staged_id: str) -> Iterator[Embedding]:
        """What is kept there; it counts until the context ends, also where it is released meanwhile.

        Raises KeyError where nothing is.
        """
        place = self._places[staged_id]
        place.readers += 1
        try:
            yield place.embedding
        finally:
            place.readers -= 1
            place.let_go()

    def release(self, staged_id: str) -> bool:
        """Keep it no longer. False where nothing is."""
        place = self._places.pop(staged_id, None)
        if place is None:
            return False
        place.expiry.cancel()
        place.is_released = True
        place.let_go()
        return True

    async def close(self) -> None:
        """See `Transport.close`. All that is kept is released."""
        self._closed = True
        for staged_id in list(self._places):
            self.release(staged_id)
