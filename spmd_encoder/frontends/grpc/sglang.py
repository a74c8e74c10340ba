"""The service that SGLang's language servers call in their gRPC mode; docs/sglang.md tells of it.

What is asked becomes what HTTP's routes are asked, so that both have one reader and one state of parts.
"""

from __future__ import annotations

from functools import partial

import msgspec

from spmd_encoder.config import Config
from spmd_encoder.frontends.base import ItemLimits
from spmd_encoder.frontends.grpc.calls import Call, Method
from spmd_encoder.frontends.grpc.messages import parse
from spmd_encoder.frontends.grpc.protos import sglang_pb2 as pb
from spmd_encoder.frontends.sglang.dialect import EncodeCall
from spmd_encoder.frontends.sglang.requests import Fields, read_encode, read_fetch, read_registration
from spmd_encoder.frontends.shared import Shared
from spmd_encoder.transports.registry import PushBackend, push_backend


class SglangService:
    name = pb.DESCRIPTOR.services_by_name["SglangEncoder"].full_name

    def __init__(self, config: Config, shared: Shared) -> None:
        self._config = config
        self._shared = shared
        self._push = push_backend(config.sglang.encoder_transfer_backend)

    def methods(self) -> dict[str, Method]:
        max_bytes = self._config.server.grpc_message_bytes
        return {
            "Encode": Method(handle=self._encode, max_bytes=max_bytes, limit_flag="--grpc-max-message-bytes"),
            "Send": Method(handle=self._send),
            "SchedulerReceiveUrl": Method(handle=self._register),
        }

    async def _encode(self, call: Call, data: bytes) -> bytes:
        max_items = self._config.server.max_items_per_request
        read = partial(_read_encode, data, self._push, max_items, ItemLimits.of(self._config))
        del data
        # No item is held here, since none must outlive its account, which the part takes over.
        media = call.account.hand_over()
        try:
            encode = await call.read(read, self._shared.pool)
            work = self._shared.dialect.encode(encode, media, call.account.add)
            del encode
        except BaseException:
            media.close()
            raise
        del read
        header = await work
        reply = pb.EncodeResponse(embedding_size=header.num_bytes, embedding_len=header.rows, embedding_dim=header.dim)
        return reply.SerializeToString()

    async def _register(self, call: Call, data: bytes) -> bytes:
        message = parse(pb.SchedulerReceiveUrlRequest, data)
        fields = _fields(req_id=message.req_id, receive_url=message.receive_url, receive_count=message.receive_count)
        registration = read_registration(fields, self._push)
        await self._shared.dialect.register(registration.part_id, registration.receiver, registration.count)
        return pb.SchedulerReceiveUrlResponse().SerializeToString()

    async def _send(self, call: Call, data: bytes) -> bytes:
        message = parse(pb.SendRequest, data)
        fields = _fields(
            req_id=message.req_id,
            prefill_host=message.prefill_host,
            embedding_port=message.embedding_port,
            session_id=message.session_id,
            buffer_address=message.buffer_address,
        )
        fetch = read_fetch(fields, self._push)
        await self._shared.dialect.send(fetch.part_id, fetch.memory, fetch.count)
        return pb.SendResponse().SerializeToString()


def _read_encode(data: bytes, push: PushBackend, max_items: int, limits: ItemLimits) -> EncodeCall:
    """Not for an event loop. Raises `EncoderError` or `RefusalError`."""
    message = parse(pb.EncodeRequest, data)
    del data
    fields = _fields(
        req_id=message.req_id,
        num_parts=message.num_parts,
        part_idx=message.part_idx,
        prefill_host=message.prefill_host,
        embedding_port=list(message.embedding_port) or None,
        modality="IMAGE",  # it has no field for it
        mm_items=list(message.mm_items),
    )
    del message
    return read_encode(fields, push, max_items=max_items, limits=limits)


def _fields(**values: object) -> Fields:
    """A message's fields as HTTP's routes get them."""
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}
