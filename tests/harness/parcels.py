"""Single items on their way to a receiver, for tests of transports."""

from __future__ import annotations

import hashlib

from spmd_encoder.api.types import Embedding, ItemFailure, Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import ItemParcel, PartLabel

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def embedding(rows: int = 2, dim: int = 4, fill: int = 1, dtype: str = "float32") -> Embedding:
    """Rows of bytes that are all `fill`; its digest depends on `fill` alone."""
    return Embedding(
        modality=Modality.IMAGE,
        kind=OutputKind.TOKENS,
        shape=(rows, dim),
        dtype=dtype,
        num_tokens=rows,
        digest=f"sha256:{hashlib.sha256(bytes([fill])).hexdigest()}",
        data=bytes([fill]) * (rows * dim * SIZES[dtype]),
        grid=(1, 2, 2),
        replica=0,
    )


def item(outcome: Embedding | None = None, index: int = 0, part: PartLabel | None = None) -> ItemParcel:
    return ItemParcel(
        request_id="r", index=index, num_items=index + 1, outcome=outcome or embedding(fill=index), part=part
    )


def failed_item(index: int = 0) -> ItemParcel:
    failure = ItemFailure(error=EncoderError(ErrorCode.MEDIA_CORRUPT, "cannot be decoded"))
    return ItemParcel(request_id="r", index=index, num_items=index + 1, outcome=failure)
