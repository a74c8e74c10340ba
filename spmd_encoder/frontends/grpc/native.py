"""The service `spmd_encoder.v1.Encoder`: `/v1/encode` with files as bytes, `/v1/models` and `/info`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
from google.protobuf.json_format import Parse

from spmd_encoder.api.service import EncoderService
from spmd_encoder.api.types import ItemOutcome
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode, time_over
from spmd_encoder.frontends.base import ItemLimits, check_model, check_output, item_name, known_model
from spmd_encoder.frontends.digests import lookup_keys
from spmd_encoder.frontends.grpc.calls import Call, Method
from spmd_encoder.frontends.grpc.messages import (
    model_message,
    parse,
    read_kind,
    read_output,
    read_request,
    reply_bytes,
    write_delivered,
    write_lookup,
    write_reply,
)
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.remote import fetch_and_encode
from spmd_encoder.frontends.shared import Shared

# Fewer bytes are written faster than a thread is asked to.
_INLINE_BYTES = 256 * 1024


class NativeService:
    name = pb.DESCRIPTOR.services_by_name["Encoder"].full_name

    def __init__(self, service: EncoderService, config: Config, shared: Shared) -> None:
        self._service = service
        self._config = config
        self._shared = shared

    def methods(self) -> dict[str, Method]:
        max_bytes = self._config.server.grpc_message_bytes
        return {
            "Encode": Method(handle=self._encode, max_bytes=max_bytes, limit_flag="--grpc-max-message-bytes"),
            "Lookup": Method(handle=self._lookup, max_bytes=max_bytes, limit_flag="--grpc-max-message-bytes"),
            "Models": Method(handle=self._models),
            "Info": Method(handle=self._info),
        }

    async def _encode(self, call: Call, data: bytes) -> bytes:
        limits = ItemLimits.of(self._config)
        read = partial(read_request, data, limits, self._config.server.max_items_per_request)
        del data
        request = await call.read(read, self._shared.pool)
        del read  # and with it the message: the items hold what is needed
        call.take_request_id(request.request_id)
        model = check_model(self._service, self._config.served_name, request.model)
        output = request.output
        elsewhere, destinations = request.elsewhere, self._shared.destinations
        if elsewhere is not None:
            output = destinations.check(elsewhere, len(request.items), output)
        check_output(self._service, output)
        outcomes = await fetch_and_encode(
            self._service,
            request.items,
            self._shared.fetcher,
            limits=limits,
            pool=self._shared.pool,
            reserve=call.account.add,
            request_id=call.request_id,
            output=output,
            timeout_s=call.time_left_s,
            check=lambda _: None,
            name=item_name,
        )
        del request
        call.exchange.note(outcomes)
        if elsewhere is not None:
            try:
                async with asyncio.timeout_at(call.deadline):
                    delivered = await destinations.deliver(elsewhere, outcomes, call.request_id)
            except TimeoutError:
                raise time_over("delivery") from None
            return write_delivered(call.request_id, model, delivered)
        return await self._written(call.request_id, model, outcomes)

    async def _written(self, request_id: str, model: str, outcomes: Sequence[ItemOutcome]) -> bytes:
        """The reply with the embeddings in it. Raises `EncoderError` TOO_LARGE."""
        size, limit = reply_bytes(outcomes), self._config.server.max_body_bytes
        if size > limit:
            raise EncoderError(
                ErrorCode.TOO_LARGE,
                f"the reply would have {size} bytes, and {limit} are the limit (--max-body-bytes); send fewer items",
            )
        write = partial(write_reply, request_id, model, outcomes)
        if size <= _INLINE_BYTES:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self._shared.pool, write)

    async def _lookup(self, call: Call, data: bytes) -> bytes:
        request = parse(pb.LookupRequest, data)
        keys = lookup_keys(request.digests, *read_kind(request))
        model = check_model(self._service, self._config.served_name, request.model or None)
        output = read_output(request.output) or known_model(self._service).default_output
        check_output(self._service, output)
        found = self._service.lookup(keys, output)
        return write_lookup(model, output, request.digests, found).SerializeToString()

    async def _models(self, call: Call, data: bytes) -> bytes:
        parse(pb.ModelsRequest, data)
        return pb.ModelsResponse(models=[model_message(known_model(self._service))]).SerializeToString()

    async def _info(self, call: Call, data: bytes) -> bytes:
        parse(pb.InfoRequest, data)
        reply = pb.InfoResponse()
        Parse(msgspec.json.encode(dict(self._service.info()), enc_hook=str), reply.info)
        return reply.SerializeToString()
