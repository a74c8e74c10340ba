"""A request's destination and where its embeddings went, as the native service's messages have them."""

from __future__ import annotations

from typing import assert_never

import msgspec

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.destinations import (
    Elsewhere,
    FileReceipt,
    PushReceipt,
    Receipt,
    Staged,
    StagedReceipt,
    ToFiles,
    ToReceiver,
)
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.transports.base import PartLabel


def read_destination(request: pb.EncodeRequest) -> Elsewhere | None:
    """Where the embeddings go, None for into the reply. Raises `EncoderError` INVALID_REQUEST."""
    if not request.HasField("destination"):
        return None
    to = request.destination
    match to.WhichOneof("to"):
        case "inline":
            return None
        case "file":
            return ToFiles([mm_hash or None for mm_hash in to.file.mm_hashes] or None)
        case "zmq":
            return ToReceiver(to.zmq.endpoint, _part(to.zmq.part) if to.zmq.HasField("part") else None)
        case "staged":
            return Staged()
        case _:
            raise EncoderError(
                ErrorCode.INVALID_REQUEST, "a destination is inline, file, zmq or staged", param="destination"
            )


def delivered_message(receipt: Receipt) -> pb.Delivered:
    message = pb.Delivered(num_bytes=receipt.num_bytes)
    match receipt:
        case FileReceipt(mm_hash, path):
            message.file.mm_hash, message.file.path = mm_hash, path
        case PushReceipt(endpoint):
            message.zmq.endpoint = endpoint
        case StagedReceipt(staged_id):
            message.staged.staged_id = staged_id
        case _:
            assert_never(receipt)
    return message


def _part(part: pb.Part) -> PartLabel:
    try:
        return msgspec.convert({"id": part.id, "index": part.index, "count": part.count or 1}, PartLabel)
    except msgspec.ValidationError:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST,
            "a part has an id of 1 to 128 characters, and an index below its count, both below 2^31",
            param="destination.part",
        ) from None
