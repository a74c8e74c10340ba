"""From a reply's bytes to results or errors; nothing that a server may send raises anything but a client error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from spmd_encoder.client import safetensors
from spmd_encoder.client.arrays import ArrayKind
from spmd_encoder.client.errors import BadReplyError, BusyError, ItemError, RefusedError
from spmd_encoder.client.results import Result
from spmd_encoder.client.retry import RETRYABLE_STATUSES, retry_after_s
from spmd_encoder.client.sources import Source

T = TypeVar("T")

SAFETENSORS = "application/vnd.safetensors"
# Codes that speak of a picture: for a request of one, the whole request's error is that picture's.
_ITEM_CODES = frozenset(
    {"TOO_LARGE", "MEDIA_UNSUPPORTED", "MEDIA_CORRUPT", "FETCH_FORBIDDEN", "FETCH_FAILED", "WORKER_DIED", "NON_FINITE"}
)


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
    error: _Error | None = None


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
        tensors, items = {}, _failures(reply, len(sent))
    if [item.index for item in items] != list(range(len(sent))):
        raise BadReplyError(f"the server answered {len(items)} items, not one for each of the {len(sent)} sent")
    if tensors.keys() != {str(item.index) for item in items if item.status == "ok"}:
        raise BadReplyError("the reply's tensors are not those of its good items")
    return [_result(reply, item, source, tensors, array_kind) for item, source in zip(items, sent, strict=True)]


def _failures(reply: Reply, num_sent: int) -> list[_Item]:
    """The items of a reply in which all of them failed. Raises `RefusedError` for any other error reply."""
    if reply.status in RETRYABLE_STATUSES:
        refuse(reply)
    outcomes = _decoded_or_none(reply, _Outcomes)
    if outcomes is not None and outcomes.data and all(item.status == "error" for item in outcomes.data):
        return outcomes.data
    refusal = _decoded_or_none(reply, _Refusal)
    if num_sent == 1 and refusal is not None and refusal.error.code in _ITEM_CODES:
        return [_Item(index=0, status="error", error=refusal.error)]
    return refuse(reply)


def _result(
    reply: Reply, item: _Item, source: Source, tensors: Mapping[str, safetensors.Tensor], array_kind: ArrayKind
) -> Result:
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
    tensor = tensors[str(item.index)]
    if (tensor.dtype, tensor.shape) != (item.dtype, item.shape):
        raise BadReplyError(f"the tensor of {source.name} has another dtype or shape than the reply says")
    return Result(
        index=source.index,
        name=source.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        grid=item.grid,
        num_tokens=item.num_tokens,
        digest=item.digest,
        replica=reply.headers.get("x-spmd-replica"),
        data=bytes(tensor.data),  # its own bytes, so that keeping one result does not keep the whole reply
        array_kind=array_kind,
    )


def failed(error: ItemError) -> Result:
    return Result(index=error.index, name=error.name, error=error)


def json_of(reply: Reply) -> dict[str, Any]:
    """The body of a good reply. Raises `RefusedError` for any other status."""
    if reply.status != 200:
        refuse(reply)
    return _decode(reply.body, dict[str, Any])


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
