"""What all renderers share: a reply's parts, an entry per item, an embedding as base64 or as numbers."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_encoder.api.types import Detail, Embedding, ItemFailure, ItemOutcome
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import item_name
from spmd_encoder.frontends.destinations import Delivered, Receipt
from spmd_encoder.frontends.http.errors import STATUS, ErrorBody, error_body, retry_headers
from spmd_encoder.frontends.http.options import Encoding

# A multiple of 3, so that the pieces' base64 can be joined. The GIL is held for one piece at a time.
_CHUNK_BYTES = 3 * 2**18
# Replies below this are rendered at once: a change of threads costs more.
_INLINE_BYTES = {"base64": 64 * 1024, "float": 4 * 1024}

JSON_TYPE = "application/json"

Text = msgspec.Raw | msgspec.UnsetType


class _Ok(msgspec.Struct, frozen=True):
    index: int
    status: Literal["ok"]
    modality: str
    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, int, int] | None
    num_tokens: int
    digest: str
    embedding: Text
    delivered: Receipt | msgspec.UnsetType = msgspec.UNSET
    details: dict[str, Detail] | msgspec.UnsetType = msgspec.UNSET


class _Failed(msgspec.Struct, frozen=True):
    index: int
    status: Literal["error"]
    error: ErrorBody


class EncodeReply(msgspec.Struct, frozen=True):
    """`error` is set where every item failed, and is the first's."""

    id: str
    model: str
    data: list[_Ok | _Failed]
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Rendered:
    """`body` is sent part after part, without being joined; each part is a view of bytes."""

    status: int
    body: tuple[memoryview, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = JSON_TYPE


def json_rendered(status: int, body: object, headers: Mapping[str, str] | None = None) -> Rendered:
    return Rendered(status, (memoryview(msgspec.json.encode(body)),), headers or {})


def is_heavy(outcomes: Sequence[ItemOutcome], encoding: Encoding) -> bool:
    """Whether writing the embeddings in `encoding` is worth a thread."""
    size = sum(len(outcome.data) for outcome in outcomes if isinstance(outcome, Embedding))
    return size > _INLINE_BYTES[encoding]


def render_json(request_id: str, model: str, outcomes: Sequence[ItemOutcome], encoding: Encoding) -> Rendered:
    """The reply of `/v1/encode` as JSON. Where every item failed, its status and `error` are those of the first."""
    return render_entries(request_id, model, outcomes, partial(_as_text, encoding))[0]


def render_delivered(request_id: str, model: str, delivered: Sequence[Delivered]) -> Rendered:
    """The same where the embeddings went elsewhere: a good item says where, in the place of its `embedding`."""
    outcomes = [item.outcome for item in delivered]
    receipts = [msgspec.UNSET if item.receipt is None else item.receipt for item in delivered]
    return render_entries(request_id, model, outcomes, lambda *_: msgspec.UNSET, receipts)[0]


def _as_text(encoding: Encoding, _: int, embedding: Embedding) -> Text:
    return base64_text(embedding.data) if encoding == "base64" else numbers_text(finite_values(embedding))


def render_entries(
    request_id: str,
    model: str,
    outcomes: Sequence[ItemOutcome],
    write: Callable[[int, Embedding], Text],
    receipts: Sequence[Receipt | msgspec.UnsetType] = (),
) -> tuple[Rendered, bool]:
    """The JSON reply, with what `write` gives as each good item's `embedding`, and its `receipts` (one per item, or
    none at all) as `delivered`; and whether any item was good.

    What `write` raises is that item's failure.
    """
    data: list[_Ok | _Failed] = []
    errors: list[EncoderError] = []
    for index, outcome in enumerate(outcomes):
        entry = outcome.error if isinstance(outcome, ItemFailure) else _entry(index, outcome, write, receipts)
        if isinstance(entry, EncoderError):
            errors.append(entry)
            data.append(_Failed(index, "error", error_body(entry)))
        else:
            data.append(entry)
    if len(errors) < len(data):
        return json_rendered(200, EncodeReply(request_id, model, data)), True
    first = errors[0]
    reply = EncodeReply(request_id, model, data, error_body(first))
    return json_rendered(STATUS[first.code], reply, retry_headers(first)), False


def _entry(
    index: int,
    embedding: Embedding,
    write: Callable[[int, Embedding], Text],
    receipts: Sequence[Receipt | msgspec.UnsetType],
) -> _Ok | EncoderError:
    try:
        text = write(index, embedding)
    except EncoderError as error:
        return error.at(item_name(index))
    return _Ok(
        index=index,
        status="ok",
        modality=embedding.modality.value,
        shape=embedding.shape,
        dtype=embedding.dtype,
        grid=embedding.grid,
        num_tokens=embedding.num_tokens,
        digest=embedding.digest,
        embedding=text,
        delivered=receipts[index] if receipts else msgspec.UNSET,
        details=embedding.details or msgspec.UNSET,
    )


def base64_text(data: bytes | memoryview) -> msgspec.Raw:
    """A JSON string."""
    view = memoryview(data).cast("B")
    pieces = [
        binascii.b2a_base64(view[start : start + _CHUNK_BYTES], newline=False)
        for start in range(0, len(view), _CHUNK_BYTES)
    ]
    return msgspec.Raw(b'"' + b"".join(pieces) + b'"')


def numbers_text(values: NDArray[np.floating]) -> msgspec.Raw:
    """Nested JSON lists."""
    if values.ndim != 2:
        return msgspec.Raw(msgspec.json.encode(values.tolist()))
    # By rows, because one call for millions of numbers would hold the GIL for seconds.
    return msgspec.Raw(b"[" + b",".join([msgspec.json.encode(row.tolist()) for row in values]) + b"]")


def finite_values(embedding: Embedding) -> NDArray[np.floating]:
    """`as_floats` in the embedding's shape. JSON has no NaN: what is not finite is the item's failure, never a null.

    Raises `EncoderError` NON_FINITE, or INTERNAL for a dtype that is no float.
    """
    values = as_floats(embedding.data, embedding.dtype).reshape(embedding.shape)
    if not np.isfinite(values).all():
        raise EncoderError(ErrorCode.NON_FINITE, "the embedding holds values that are not finite")
    return values


def as_floats(data: bytes | memoryview, dtype: str) -> NDArray[np.floating]:
    """Little-endian bytes of torch's `dtype` as numbers, without torch; every value is exact.

    Raises `EncoderError` INTERNAL for a dtype that is no float.
    """
    match dtype:
        case "bfloat16":  # the upper half of a float32
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        case "float16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        case "float32":
            return np.frombuffer(data, "<f4")
        case "float64":
            return np.frombuffer(data, "<f8")
        case _:
            raise EncoderError(ErrorCode.INTERNAL, f"embeddings in {dtype} cannot be written as numbers")
