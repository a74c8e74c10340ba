"""From items' outcomes to a part's parcel, and the bytes of parcels that wait or are on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from spmd_encoder.api.types import Embedding, ItemFailure, ItemOutcome
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import Parcel, ParcelHeader


def parcel_of(header: ParcelHeader, outcomes: Sequence[ItemOutcome]) -> Parcel:
    """All items' rows, `[sum of tokens, dim]`, for the part that `header` names.

    Raises `EncoderError`: the first failed item's, or INTERNAL where the items do not fit together.
    """
    embeddings: list[Embedding] = []
    for outcome in outcomes:
        if isinstance(outcome, ItemFailure):
            raise outcome.error
        embeddings.append(outcome)
    kinds = {(embedding.dtype, embedding.shape[1:]) for embedding in embeddings}
    rows = sum(embedding.shape[0] for embedding in embeddings)
    if len(kinds) != 1 or any(len(embedding.shape) != 2 for embedding in embeddings) or not rows:
        raise EncoderError(ErrorCode.INTERNAL, "the items' embeddings do not make one table of rows")
    ((dtype, (dim,)),) = kinds
    filled = replace(
        header,
        grids=tuple(embedding.grid or (1, 1, embedding.shape[0]) for embedding in embeddings),
        dtype=dtype,
        rows=rows,
        dim=dim,
        num_bytes=sum(memoryview(embedding.data).nbytes for embedding in embeddings),
    )
    return Parcel(header=filled, chunks=tuple(embedding.data for embedding in embeddings))


class StagedBytes:
    """A budget of bytes of finished embeddings."""

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
