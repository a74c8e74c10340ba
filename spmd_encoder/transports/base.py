"""What a transport is: it takes a parcel (the rows of some items, or why there are none) to a destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from spmd_encoder.api.types import Modality

Buffer = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class ParcelHeader:
    """What a receiver must know of a part of its request before it can use the rows.

    `part_id` is the receiver's own name of the part, which is number `part_idx` of `num_parts`. `grids` has an entry
    per item, (t, h, w) in patches, in the order of the rows. `rows` and `dim` are the shape of all items' rows
    together, `dtype` is torch's name of it.
    """

    part_id: str
    num_parts: int
    part_idx: int
    modality: Modality
    grids: tuple[tuple[int, int, int], ...] = ()
    dtype: str = ""
    rows: int = 0
    dim: int = 0
    num_bytes: int = 0
    """Of all rows."""


@dataclass(frozen=True, kw_only=True)
class ParcelError:
    """Why there are no rows. `status` is an HTTP status; `message` is never empty and never holds media."""

    status: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """`chunks` are the rows' little-endian C-order bytes, one chunk after another; empty where there is an `error`."""

    header: ParcelHeader
    chunks: tuple[Buffer, ...] = ()
    error: ParcelError | None = None

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(chunk).nbytes for chunk in self.chunks)


@dataclass(frozen=True, order=True)
class PushEndpoint:
    """A socket that the receiver has bound: TCP, `host` a name or an address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DestinationT = TypeVar("DestinationT", contravariant=True)


class Transport(Protocol[DestinationT]):
    """Owns connections or files, not parcels: a parcel's bytes are let go of when `deliver` returns."""

    async def deliver(self, parcel: Parcel, destination: DestinationT) -> None:
        """Return when the parcel has left this process for good; that it was read, nobody can know.

        Delivers once or not at all, and never a second time by itself. Never blocks the event loop, and ends within
        the transport's own time limit. Raises `EncoderError` DELIVERY_FAILED, which names the destination.
        """
        ...

    async def close(self) -> None:
        """What is under way fails with DELIVERY_FAILED. May be called again."""
        ...


class Framing(Protocol):
    """A message format: how a parcel looks as the frames of one multipart message."""

    def __call__(self, parcel: Parcel) -> Sequence[Buffer]: ...
