"""From outcomes to a JSON reply."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_encoder.api.types import Embedding, ItemFailure, ItemOutcome
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import item_name
from spmd_encoder.frontends.http.errors import STATUS, ErrorBody, error_body, retry_headers
from spmd_encoder.frontends.http.parse import Encoding

# A multiple of 3, so that the pieces' base64 can be joined. The GIL is held for one piece at a time.
_CHUNK_BYTES = 3 * 2**18


class _Ok(msgspec.Struct, frozen=True):
    index: int
    status: Literal["ok"]
    modality: str
    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, int, int] | None
    num_tokens: int
    digest: str
    embedding: msgspec.Raw


class _Failed(msgspec.Struct, frozen=True):
    index: int
    status: Literal["error"]
    error: ErrorBody


class _Reply(msgspec.Struct, frozen=True):
    id: str
    model: str
    data: list[_Ok | _Failed]
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Rendered:
    status: int
    body: bytes
    headers: dict[str, str]


def num_bytes(outcomes: Sequence[ItemOutcome]) -> int:
    """Bytes of all embeddings, to tell whether rendering is worth a thread."""
    return sum(len(outcome.data) for outcome in outcomes if isinstance(outcome, Embedding))


def render(request_id: str, model: str, outcomes: Sequence[ItemOutcome], encoding: Encoding) -> Rendered:
    """The reply. Where every item failed, its status and `error` are those of the first."""
    data: list[_Ok | _Failed] = []
    errors: list[EncoderError] = []
    for index, outcome in enumerate(outcomes):
        rendered = outcome.error if isinstance(outcome, ItemFailure) else _item(index, outcome, encoding)
        if isinstance(rendered, EncoderError):
            errors.append(rendered)
            data.append(_Failed(index, "error", error_body(rendered)))
        else:
            data.append(rendered)
    if len(errors) < len(data):
        return Rendered(200, msgspec.json.encode(_Reply(request_id, model, data)), {})
    first = errors[0]
    body = msgspec.json.encode(_Reply(request_id, model, data, error_body(first)))
    return Rendered(STATUS[first.code], body, retry_headers(first))


def _item(index: int, embedding: Embedding, encoding: Encoding) -> _Ok | EncoderError:
    try:
        text = _base64(embedding.data) if encoding == "base64" else _numbers(embedding)
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
        embedding=msgspec.Raw(text),
    )


def _base64(data: bytes | memoryview) -> bytes:
    view = memoryview(data).cast("B")
    pieces = [
        binascii.b2a_base64(view[start : start + _CHUNK_BYTES], newline=False)
        for start in range(0, len(view), _CHUNK_BYTES)
    ]
    return b'"' + b"".join(pieces) + b'"'


def _numbers(embedding: Embedding) -> bytes:
    """Nested lists. JSON has no NaN: what is not finite is the item's failure, never a null."""
    values = as_floats(embedding.data, embedding.dtype).reshape(embedding.shape)
    if not np.isfinite(values).all():
        raise EncoderError(ErrorCode.NON_FINITE, "the embedding holds values that are not finite")
    if values.ndim != 2:
        return msgspec.json.encode(values.tolist())
    # By rows, because one call for millions of numbers would hold the GIL for seconds.
    return b"[" + b",".join([msgspec.json.encode(row.tolist()) for row in values]) + b"]"


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
