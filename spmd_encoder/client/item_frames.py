"""Reads the messages that a server pushes, one per item, checked to the last byte; docs/wire.md has the format.

Nothing that a peer may send makes this raise anything but `BadFrameError`, or take more memory than the message has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from spmd_encoder.client.arrays import DTYPE_BYTES, ArrayKind, Buffer, to_numpy, to_torch

MAX_HEADER_BYTES = 1024 * 1024

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Text = Annotated[str, msgspec.Meta(max_length=128)]


Detail: TypeAlias = int | float | list[float]


class BadFrameError(ValueError):
    """A message that is none of ours; the text says why, without quoting it."""


class Part(msgspec.Struct, frozen=True):
    """What the request said as `part`."""

    id: _Text
    index: _Count
    count: _Positive


class Failure(msgspec.Struct, frozen=True):
    """Why an item has no embedding; `code` is one of the server's stable codes."""

    code: _Text
    message: Annotated[str, msgspec.Meta(max_length=4096)]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """One of a request's `num_items` messages. `shape` is `[num_tokens, dim]` or `[dim]`, `dtype` torch's name, `grid`
    (t, h, w) in patches where the model has one, `digest` `sha256:<hex>` of the file as sent. `details` are facts about
    the item that a language model needs, as the model names them; older servers do not send them."""

    version: Literal[1]
    request_id: _Text
    part: Part | None
    index: _Count
    num_items: _Positive
    modality: _Text
    kind: _Text
    dtype: _Text
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=8)]
    grid: tuple[_Count, _Count, _Count] | None
    num_tokens: _Count
    digest: _Text
    details: Annotated[dict[_Text, Detail], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    error: Failure | None


class Received(NamedTuple):
    """`array` is None where the header has an `error`."""

    header: Header
    array: Any


def read_frames(frames: Sequence[Buffer], array_kind: ArrayKind) -> Received:
    """A whole message. Raises `BadFrameError`."""
    if len(frames) not in (1, 2):
        raise BadFrameError(f"{len(frames)} frames, where one or two belong")
    header = _header(frames[0])
    if header.error is not None:
        if len(frames) == 2:
            raise BadFrameError("an error with rows")
        return Received(header, None)
    if len(frames) != 2:
        raise BadFrameError("a header without rows")
    size = DTYPE_BYTES.get(header.dtype)
    if size is None:
        raise BadFrameError("a dtype that is no float type")
    if math.prod(header.shape) * size != memoryview(frames[1]).nbytes:
        raise BadFrameError("rows that are not as many bytes as the header's shape and dtype have")
    make = to_numpy if array_kind == "numpy" else to_torch
    return Received(header, make(frames[1], header.dtype, header.shape))


def _header(frame: Buffer) -> Header:
    if memoryview(frame).nbytes > MAX_HEADER_BYTES:
        raise BadFrameError(f"a header of more than {MAX_HEADER_BYTES} bytes")
    try:
        header = msgspec.msgpack.decode(frame, type=Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise BadFrameError("a header that is not of this format and version") from None
    if header.index >= header.num_items:
        raise BadFrameError("an index that is not below the number of items")
    return header
