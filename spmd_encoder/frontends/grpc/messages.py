"""From the native service's messages to items, and from outcomes to its messages. Not for an event loop where large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from spmd_encoder.api.types import (
    Embedding,
    HeldResult,
    ItemFailure,
    ItemOptions,
    ItemOutcome,
    Modality,
    ModelInfo,
    OutputKind,
)
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits, SourceItem, check_count, item_name, parse_item, read_item
from spmd_encoder.frontends.destinations import Delivered, Elsewhere
from spmd_encoder.frontends.digests import held_item
from spmd_encoder.frontends.grpc.destination import delivered_message, read_destination
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.sampling import DEFAULT_FPS, sampling_of
from spmd_encoder.media.frames import pack

M = TypeVar("M", bound=Message)

_OUTPUTS = MappingProxyType({OutputKind.POOLED: pb.OUTPUT_POOLED, OutputKind.TOKENS: pb.OUTPUT_TOKENS})
_MODALITIES = MappingProxyType(
    {Modality.IMAGE: pb.MODALITY_IMAGE, Modality.AUDIO: pb.MODALITY_AUDIO, Modality.VIDEO: pb.MODALITY_VIDEO}
)
# What a reply has besides the embeddings, for each item at most.
_ENTRY_BYTES = 4096
# A number of `details`, with its name.
_NUMBER_BYTES = 64


@dataclass(frozen=True)
class Request:
    """`elsewhere` is where the embeddings go, if not into the reply."""

    items: list[SourceItem]
    output: OutputKind | None
    request_id: str
    model: str | None
    elsewhere: Elsewhere | None


def parse(kind: type[M], data: bytes) -> M:
    """Raises `EncoderError` INVALID_REQUEST."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        name = message.DESCRIPTOR.full_name
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"the message is no {name}") from None
    return message


def read_request(data: bytes, limits: ItemLimits, max_items: int) -> Request:
    """Hashes the items and reads their headers. Raises `EncoderError` where the request as a whole is wrong."""
    message = parse(pb.EncodeRequest, data)
    del data
    check_count(len(message.items), max_items)
    output = read_output(message.output)
    elsewhere = read_destination(message)
    items: list[SourceItem] = []
    for index, item in enumerate(message.items):
        items.append(_source(item, limits, item_name(index)))
        item.Clear()  # so that each is in memory only once
    return Request(items, output, message.request_id, message.model or None, elsewhere)


def read_output(number: int) -> OutputKind | None:
    """Raises `EncoderError` INVALID_REQUEST."""
    if number == pb.OUTPUT_UNSPECIFIED:
        return None
    output = next((kind for kind, known in _OUTPUTS.items() if known == number), None)
    if output is None:
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"there is no output {number}", param="output")
    return output


def write_lookup(
    model: str, output: OutputKind, digests: Sequence[str], found: Sequence[HeldResult | None]
) -> pb.LookupResponse:
    reply = pb.LookupResponse(model=model, output=_OUTPUTS[output])
    for digest, held in zip(digests, found, strict=True):
        entry = reply.results.add(digest=digest, held=held is not None)
        if held is not None:
            entry.replicas.extend(held.replicas)
            entry.shape.extend(held.shape)
            entry.grid.extend(held.grid or ())
            entry.dtype, entry.num_tokens = held.dtype, held.num_tokens
    return reply


def _source(item: pb.Item, limits: ItemLimits, name: str) -> SourceItem:
    try:
        modality, options = read_kind(item)
        match item.WhichOneof("source"):
            case "data":
                return read_item(modality, item.data, limits, name, options)
            case "url":
                return parse_item(modality, item.url, limits, name, options)
            case "digest":
                return held_item(modality, item.digest, options)
            case "frames":
                return read_item(modality, _clip(modality, item, options), limits, name)
            case _:
                raise EncoderError(ErrorCode.INVALID_REQUEST, "an item has `data`, `url`, `digest` or `frames`")
    except EncoderError as error:
        return error.at(name)


def read_kind(message: pb.Item | pb.LookupRequest) -> tuple[Modality, ItemOptions]:
    """Raises `EncoderError` INVALID_REQUEST."""
    number = message.modality or pb.MODALITY_IMAGE
    modality = next((modality for modality, known in _MODALITIES.items() if known == number), None)
    if modality is None:
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"there is no modality {number}")
    fps = message.fps if message.HasField("fps") else None
    max_frames = message.max_frames if message.HasField("max_frames") else None
    if modality is not Modality.VIDEO and (fps, max_frames) != (None, None):
        raise EncoderError(ErrorCode.INVALID_REQUEST, "`fps` and `max_frames` say how a film is sampled")
    return modality, sampling_of(fps, max_frames)


def _clip(modality: Modality, item: pb.Item, options: ItemOptions) -> bytes:
    if modality is not Modality.VIDEO or options.max_frames is not None:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST, "`frames` are a film's, and encoded as they are, so they take no `max_frames`"
        )
    return pack(item.frames.files, options.fps or DEFAULT_FPS)


def reply_bytes(outcomes: Sequence[ItemOutcome]) -> int:
    """At most how many bytes the reply has."""
    return sum(_ENTRY_BYTES + (_embedding_bytes(o) if isinstance(o, Embedding) else 0) for o in outcomes)


def _embedding_bytes(embedding: Embedding) -> int:
    numbers = sum(len(value) if isinstance(value, list) else 1 for value in embedding.details.values())
    return memoryview(embedding.data).nbytes + _NUMBER_BYTES * numbers


def write_reply(request_id: str, model: str, outcomes: Sequence[ItemOutcome]) -> bytes:
    reply = pb.EncodeResponse(request_id=request_id, model=model)
    for outcome in outcomes:
        _add_result(reply, outcome)
        if isinstance(outcome, Embedding):
            reply.results[-1].embedding.data = bytes(outcome.data)
    return reply.SerializeToString()


def write_delivered(request_id: str, model: str, delivered: Sequence[Delivered]) -> bytes:
    """The same where the embeddings went elsewhere: each says where, in the place of its `data`."""
    reply = pb.EncodeResponse(request_id=request_id, model=model)
    for item in delivered:
        _add_result(reply, item.outcome)
        if item.receipt is not None:
            reply.results[-1].embedding.delivered.CopyFrom(delivered_message(item.receipt))
    return reply.SerializeToString()


def _add_result(reply: pb.EncodeResponse, outcome: ItemOutcome) -> None:
    """Without the embedding itself."""
    result = reply.results.add()
    if isinstance(outcome, ItemFailure):
        error = outcome.error
        result.error.code, result.error.message = error.code.value, error.message
        result.error.param = error.param or ""
    else:
        _describe(result.embedding, outcome)


def _describe(message: pb.Embedding, embedding: Embedding) -> None:
    message.modality = _MODALITIES[embedding.modality]
    message.output = _OUTPUTS[embedding.kind]
    message.shape.extend(embedding.shape)
    message.dtype = embedding.dtype
    message.grid.extend(embedding.grid or ())
    message.num_tokens = embedding.num_tokens
    message.digest = embedding.digest
    message.cached = embedding.cached
    if embedding.details:
        message.details.update(embedding.details)


def model_message(info: ModelInfo) -> pb.Model:
    return pb.Model(
        id=info.name,
        dtype=info.dtype,
        outputs=[_OUTPUTS[kind] for kind in info.outputs],
        default_output=_OUTPUTS[info.default_output],
        embedding_dims={kind.value: dim for kind, dim in info.embedding_dims.items()},
        modalities=[_MODALITIES[modality] for modality in info.modalities],
        random_weights=info.random_weights,
        revision=info.revision or "",
    )
