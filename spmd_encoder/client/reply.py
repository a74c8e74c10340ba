"""From a reply's bytes to results or errors; nothing that a server may send raises anything but a client error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from spmd_encoder.client import safetensors
from spmd_encoder.client.arrays import ArrayKind, check_kind
from spmd_encoder.client.destinations import Receipt
from spmd_encoder.client.errors import BadReplyError, BusyError, ItemError, RefusedError
from spmd_encoder.client.files import read_regular
from spmd_encoder.client.results import Detail, Result
from spmd_encoder.client.retry import RETRYABLE_STATUSES, retry_after_s
from spmd_encoder.client.sources import Source

T = TypeVar("T")

SAFETENSORS = "application/vnd.safetensors"
JSON = "application/json"
# Codes that speak of a picture: for a request of one, the whole request's error is that picture's.
_ITEM_CODES = frozenset(
    {
        *("TOO_LARGE", "MEDIA_UNSUPPORTED", "MEDIA_CORRUPT", "FETCH_FORBIDDEN", "FETCH_FAILED"),
        *("WORKER_DIED", "NON_FINITE"),
    }
)
_DIGEST_CODES = _ITEM_CODES | {"NOT_FOUND"}
"""For what is sent by its digest. Of other requests this code says that the server has no such route."""
# Names in a reply of /v1/staged, and in a file of the destination `file`.
_STAGED_TENSOR, _FILE_TENSOR, _ABOUT = "embedding", "ec_cache", "item"


@dataclass(frozen=True)
class Reply:
    """A whole HTTP reply. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class _Error(msgspec.Struct, frozen=True):
    message: str
    code: str
    param: str | None = None


class _Item(msgspec.Struct, frozen=True):
    index: int
    status: Literal["ok", "error"]
    shape: tuple[int, ...] = ()
    dtype: str = ""
    grid: tuple[int, int, int] | None = None
    num_tokens: int = 0
    digest: str = ""
    modality: str = ""
    details: dict[str, Detail] = msgspec.field(default_factory=dict)
    error: _Error | None = None
    delivered: Receipt | None = None


class _About(msgspec.Struct, frozen=True):
    """What a file of one item says of it."""

    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, int, int] | None
    num_tokens: int
    digest: str
    modality: str = ""
    details: dict[str, Detail] = msgspec.field(default_factory=dict)


class _Outcomes(msgspec.Struct, frozen=True):
    data: list[_Item]


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


def results_of(reply: Reply, sent: Sequence[Source], array_kind: ArrayKind) -> list[Result]:
    """One result per picture that was sent, in order.

    Raises `RefusedError` (or `BusyError`) where the request as a whole was refused, `BadReplyError` for nonsense.
    """
    if reply.status == 200 and reply.media_type == SAFETENSORS:
        tensors, metadata = safetensors.parse(reply.body)
        items = _decode(metadata.get("response", "").encode(), _Outcomes).data
    elif reply.status == 200:
        raise BadReplyError(
            f"the server answered {reply.media_type or 'a body without a type'} where {SAFETENSORS} was asked for; "
            "it is older than this client, or something else"
        )
    else:
        tensors, items = {}, _failures(reply, sent)
    _check_one_each(items, sent)
    if tensors.keys() != {str(item.index) for item in items if item.status == "ok"}:
        raise BadReplyError("the reply's tensors are not those of its good items")
    results = [_outcome(reply, item, source) for item, source in zip(items, sent, strict=True)]
    return [
        _filled(result, tensors[str(number)], array_kind) if result.ok else result
        for number, result in enumerate(results)
    ]


def delivered_of(reply: Reply, sent: Sequence[Source]) -> list[Result]:
    """One result per picture that was sent, in order, each with where it is. Raises as `results_of` does."""
    outcomes = _decoded_or_none(reply, _Outcomes)
    items = _failures(reply, sent) if outcomes is None else outcomes.data
    _check_one_each(items, sent)
    if any(item.status == "ok" and item.delivered is None for item in items):
        raise BadReplyError("the server does not say where a good item is")
    return [_outcome(reply, item, source) for item, source in zip(items, sent, strict=True)]


def has_outcomes(reply: Reply) -> bool:
    """Whether it says what became of each item, whatever its status, so that the request was carried out."""
    return _decoded_or_none(reply, _Outcomes) is not None


def staged_of(reply: Reply, staged_id: str, array_kind: ArrayKind) -> Result:
    """What was fetched from `/v1/staged`. Raises as `results_of` does."""
    if reply.status != 200:
        refuse(reply)
    if reply.media_type != SAFETENSORS:
        raise BadReplyError(f"the server answered {reply.media_type or 'a body without a type'}, not {SAFETENSORS}")
    return _of_one(reply.body, _STAGED_TENSOR, staged_id, array_kind)


def read_embedding_file(path: str | Path, as_: ArrayKind = "numpy") -> Result:
    """What a server has written for the destination `file`, with the facts that a language model needs beside the
    rows. `path` is that file itself: the server's `--embedding-dir`, then `delivered.path`.

    Raises `BadReplyError` where it is damaged, or written by another program; OSError, ValueError for a pipe.
    """
    check_kind(as_)
    return _of_one(read_regular(str(path)), _FILE_TENSOR, str(path), as_)


def _of_one(body: bytes | bytearray, tensor: str, name: str, array_kind: ArrayKind) -> Result:
    tensors, metadata = safetensors.parse(body)
    if tensors.keys() != {tensor}:
        raise BadReplyError(f"{name[:200]} holds other tensors than `{tensor}`")
    about = _decode(metadata.get(_ABOUT, "").encode(), _About)
    result = Result(
        index=0,
        name=name,
        shape=about.shape,
        dtype=about.dtype,
        grid=about.grid,
        num_tokens=about.num_tokens,
        digest=about.digest,
        modality=about.modality,
        details=about.details,
    )
    return _filled(result, tensors[tensor], array_kind)


def _check_one_each(items: Sequence[_Item], sent: Sequence[Source]) -> None:
    if [item.index for item in items] != list(range(len(sent))):
        raise BadReplyError(f"the server answered {len(items)} items, not one for each of the {len(sent)} sent")


def _failures(reply: Reply, sent: Sequence[Source]) -> list[_Item]:
    """The items of a reply in which all of them failed. Raises `RefusedError` for any other error reply."""
    if reply.status in RETRYABLE_STATUSES:
        refuse(reply)
    outcomes = _decoded_or_none(reply, _Outcomes)
    if outcomes is not None and outcomes.data and all(item.status == "error" for item in outcomes.data):
        return outcomes.data
    refusal = _decoded_or_none(reply, _Refusal)
    codes = _ITEM_CODES if sent[0].digest is None else _DIGEST_CODES
    if len(sent) == 1 and refusal is not None and refusal.error.code in codes:
        return [_Item(index=0, status="error", error=refusal.error)]
    return refuse(reply)


def _outcome(reply: Reply, item: _Item, source: Source) -> Result:
    """Without the embedding itself."""
    if item.status == "error":
        said = item.error or _Error("the server gave no reason", "INTERNAL")
        error = ItemError(
            said.message,
            code=said.code,
            index=source.index,
            name=source.name,
            request_id=reply.headers.get("x-request-id"),
        )
        return failed(error)
    return Result(
        index=source.index,
        name=source.name,
        shape=item.shape,
        dtype=item.dtype,
        grid=item.grid,
        num_tokens=item.num_tokens,
        digest=item.digest,
        modality=item.modality,
        details=item.details,
        replica=reply.headers.get("x-spmd-replica"),
        delivered=item.delivered,
    )


def _filled(result: Result, tensor: safetensors.Tensor, array_kind: ArrayKind) -> Result:
    if (tensor.dtype, tensor.shape) != (result.dtype, result.shape):
        raise BadReplyError(f"the tensor of {result.name} has another dtype or shape than the reply says")
    # Its own bytes, so that keeping one result does not keep the whole reply.
    return replace(result, data=bytes(tensor.data), array_kind=array_kind)


def failed(error: ItemError) -> Result:
    return Result(index=error.index, name=error.name, error=error)


def json_of(reply: Reply) -> dict[str, Any]:
    """The body of a good reply. Raises `RefusedError` for any other status."""
    if reply.status != 200:
        refuse(reply)
    return _decode(reply.body, dict[str, Any])


def said(reply: Reply) -> str:
    """An error reply's message."""
    refusal = _decoded_or_none(reply, _Refusal)
    return f"HTTP {reply.status}" if refusal is None else refusal.error.message


def refuse(reply: Reply) -> NoReturn:
    """Raise what an error reply says, also where it is no error of this API (a proxy's page)."""
    refusal = _decoded_or_none(reply, _Refusal)
    if refusal is None:
        text = f"the server answered HTTP {reply.status} without an error of this API"
        refusal = _Refusal(_Error(text, f"HTTP_{reply.status}"))
    error = refusal.error
    kind = BusyError if reply.status in RETRYABLE_STATUSES else RefusedError
    raise kind(
        error.message,
        status=reply.status,
        code=error.code,
        param=error.param,
        request_id=reply.headers.get("x-request-id"),
        retry_after_s=retry_after_s(reply.headers),
    )


def _decoded_or_none(reply: Reply, kind: type[T]) -> T | None:
    try:
        return _decode(reply.body, kind)
    except BadReplyError:
        return None


def _decode(body: bytes | bytearray, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadReplyError(f"the reply is not what this API answers: {str(error)[:200]}") from None
