"""Our own push message, one per item: frame 0 is a header in msgpack, frame 1 the rows.

docs/wire.md has it byte by byte. `client/item_frames.py` reads it; the two share nothing but that document, as any
other reader would.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from spmd_encoder.api.types import Detail, Embedding
from spmd_encoder.transports.base import Buffer, ItemParcel, PartLabel

VERSION = 1
_MAX_MESSAGE_CHARS = 1000


class ItemError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ItemHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A map with these keys in this order. Where there is an `error`, what describes rows is empty."""

    version: Literal[1] = 1
    request_id: str
    part: PartLabel | None
    index: int
    num_items: int
    modality: str = ""
    kind: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    grid: tuple[int, int, int] | None = None
    num_tokens: int = 0
    digest: str = ""
    details: dict[str, Detail] = msgspec.field(default_factory=dict)
    error: ItemError | None = None


def item_frames(parcel: ItemParcel) -> list[Buffer]:
    """A `Framing`. An error has frame 0 alone."""
    header = msgspec.msgpack.encode(_header(parcel))
    return [header, *parcel.chunks]


def _header(parcel: ItemParcel) -> ItemHeader:
    outcome = parcel.outcome
    if isinstance(outcome, Embedding):
        return ItemHeader(
            request_id=parcel.request_id,
            part=parcel.part,
            index=parcel.index,
            num_items=parcel.num_items,
            modality=outcome.modality.value,
            kind=outcome.kind.value,
            dtype=outcome.dtype,
            shape=outcome.shape,
            grid=outcome.grid,
            num_tokens=outcome.num_tokens,
            digest=outcome.digest,
            details=outcome.details,
        )
    error = ItemError(outcome.error.code.value, outcome.error.message[:_MAX_MESSAGE_CHARS])
    return ItemHeader(
        request_id=parcel.request_id, part=parcel.part, index=parcel.index, num_items=parcel.num_items, error=error
    )
