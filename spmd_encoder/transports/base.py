"""What a transport is: it takes a parcel (rows, or why there are none) to a destination."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import msgspec

from spmd_encoder.api.types import Detail, Embedding, ItemOutcome, Modality
from spmd_encoder.errors import EncoderError, ErrorCode

Buffer = bytes | memoryview

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,32})?")
_TCP = re.compile(r"tcp://(?:\[([^\[\]]+)\]|([^\[\]:/]+)):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class ParcelHeader:
    """What a receiver must know of a part of its request before it can use the rows.

    `part_id` is the receiver's own name of the part, which is number `part_idx` of `num_parts`. `grids` has an entry
    per item, (t, h, w) in patches, in the order of the rows, and so has `details`, which are those of `Embedding`.
    `rows` and `dim` are the shape of all items' rows together, `dtype` is torch's name of it.
    """

    part_id: str
    num_parts: int
    part_idx: int
    modality: Modality
    grids: tuple[tuple[int, int, int], ...] = ()
    details: tuple[dict[str, Detail], ...] = ()
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

    @classmethod
    def parse(cls, text: str) -> PushEndpoint:
        """From `tcp://host:port`, an IPv6 address in brackets. Raises `EncoderError` INVALID_REQUEST for all else."""
        match = _TCP.fullmatch(text)
        host, port = (match[1] or match[2], int(match[3])) if match else ("", 0)
        if not is_host(host) or not 0 < port < 65536:
            raise EncoderError(ErrorCode.INVALID_REQUEST, "an endpoint is written tcp://host:port")
        return cls(host, port)


@dataclass(frozen=True)
class RemoteMemory:
    """Room that a receiver has registered with its transfer engine, which is found at `session`. At `endpoint` it is
    told when the rows are there."""

    endpoint: PushEndpoint
    session: PushEndpoint
    address: int

    def __str__(self) -> str:
        return f"the memory of {self.session}"


def is_host(text: str) -> bool:
    """Whether it is written like a host's name or address, without brackets."""
    return _HOST.fullmatch(text) is not None


class PartLabel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's own name of what it waits for, of which this request is number `index` of `count`."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    count: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1

    def __post_init__(self) -> None:
        if self.index >= self.count:
            raise ValueError("`index` must be below `count`")


@dataclass(frozen=True, kw_only=True)
class ItemParcel:
    """Number `index` of the `num_items` of a request, by itself: its embedding, or why there is none."""

    request_id: str
    index: int
    num_items: int
    outcome: ItemOutcome
    part: PartLabel | None = None

    @property
    def chunks(self) -> tuple[Buffer, ...]:
        return (self.outcome.data,) if isinstance(self.outcome, Embedding) else ()

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(chunk).nbytes for chunk in self.chunks)


class AnyParcel(Protocol):
    """What `Parcel` and `ItemParcel` have in common."""

    @property
    def chunks(self) -> tuple[Buffer, ...]: ...

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T")
ParcelT = TypeVar("ParcelT", bound=AnyParcel)
ParcelInT = TypeVar("ParcelInT", bound=AnyParcel, contravariant=True)
DestinationT = TypeVar("DestinationT", contravariant=True)


class Transport(Protocol[ParcelInT, DestinationT]):
    """Owns connections, files or a place for parcels on their way."""

    async def deliver(self, parcel: ParcelInT, destination: DestinationT) -> None:
        """Return when the parcel is where its receiver can have it; that it was read, nobody can know.

        Delivers once or not at all, and never a second time by itself. Never blocks the event loop, and ends within
        the transport's own time limit. Raises `EncoderError` DELIVERY_FAILED, which names the destination.
        """
        ...

    async def close(self) -> None:
        """What is under way fails with DELIVERY_FAILED, and so does whatever comes later. May be called again."""
        ...


class Run(Protocol):
    """Runs a call that may block, or hang for ever, in a thread that does not keep the process from ending."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class Framing(Protocol[ParcelInT]):
    """A message format: how a parcel looks as the frames of one multipart message."""

    def __call__(self, parcel: ParcelInT) -> Sequence[Buffer]: ...
