"""From items' outcomes to a part's parcel."""

from __future__ import annotations

from collections.abc import Sequence
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
        details=tuple(embedding.details for embedding in embeddings),
        dtype=dtype,
        rows=rows,
        dim=dim,
        num_bytes=sum(memoryview(embedding.data).nbytes for embedding in embeddings),
    )
    return Parcel(header=filled, chunks=tuple(embedding.data for embedding in embeddings))
