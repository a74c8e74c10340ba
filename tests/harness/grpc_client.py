"""A gRPC client for tests: both services' methods over one channel, and errors as they are told."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.grpc.protos import sglang_pb2 as sglang_pb

M = TypeVar("M", bound=Message)
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


class GrpcClient:
    """`options` are the channel's. A subchannel of its own, so that clients share no connection."""

    def __init__(self, port: int, host: str = "127.0.0.1", options: tuple[tuple[str, int], ...] = UNLIMITED) -> None:
        own = (("grpc.use_local_subchannel_pool", 1),)
        self.channel = grpc.aio.insecure_channel(f"{host}:{port}", options=(*options, *own))
        native, sglang = "/spmd_encoder.v1.Encoder/", "/sglang.grpc.encoder.SglangEncoder/"
        health = "/grpc.health.v1.Health/"
        self.encode = self._unary(native + "Encode", pb.EncodeResponse)
        self.lookup = self._unary(native + "Lookup", pb.LookupResponse)
        self.models = self._unary(native + "Models", pb.ModelsResponse)
        self.info = self._unary(native + "Info", pb.InfoResponse)
        self.sglang_encode = self._unary(sglang + "Encode", sglang_pb.EncodeResponse)
        self.sglang_send = self._unary(sglang + "Send", sglang_pb.SendResponse)
        self.sglang_register = self._unary(sglang + "SchedulerReceiveUrl", sglang_pb.SchedulerReceiveUrlResponse)
        self.check = self._unary(health + "Check", health_pb2.HealthCheckResponse)
        self.list = self._unary(health + "List", health_pb2.HealthListResponse)
        self.watch = self.channel.unary_stream(
            health + "Watch",
            request_serializer=_serialized,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self.raw: Any = self.channel.unary_unary(native + "Encode")
        """The same as `encode`, with bytes."""

    def _unary(self, method: str, reply: type[M]) -> Any:
        return self.channel.unary_unary(method, request_serializer=_serialized, response_deserializer=reply.FromString)

    async def __aenter__(self) -> GrpcClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        await self.channel.close()


def data_items(*files: bytes) -> list[pb.Item]:
    return [pb.Item(data=file) for file in files]


def error_info(error: grpc.aio.AioRpcError) -> tuple[str, str | None, float | None]:
    """(code, param, seconds until trying again can help), out of an error's details."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info, retry, retry_after_s = ErrorInfo(), RetryInfo(), None
    for detail in status.details:
        if detail.Is(ErrorInfo.DESCRIPTOR):
            assert detail.Unpack(info)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return info.reason, info.metadata.get("param"), retry_after_s


def metadata_of(pairs: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in pairs or ()}
