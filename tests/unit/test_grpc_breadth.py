"""gRPC as generic tools use it: grpcurl by reflection, grpc-health-probe, many streams at once, noise."""

from __future__ import annotations

import asyncio
import base64
import random
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from tests.harness.fake_service import READY, picture_file
from tests.harness.grpc_client import GrpcClient, data_items
from tests.unit.test_grpc_encode import Served, serve

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve() as found:
        yield found


# -- reflection


class Grpcurl:
    """Knows no message of ours: all of it comes over the wire, and goes as JSON."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = descriptor_pool.DescriptorPool(self._database)

    def list(self, service: str | None = None) -> list[str]:
        if service is None:
            return sorted(self._database.get_services())
        return [method.name for method in self._pool.FindServiceByName(service).methods]

    def call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        service, _, method_name = name.partition("/")
        method = self._pool.FindServiceByName(service).FindMethodByName(method_name)
        message = json_format.ParseDict(request, GetMessageClass(method.input_type)())
        call = self._channel.unary_unary(
            f"/{name}",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return json_format.MessageToDict(call(message, timeout=10), preserving_proto_field_name=True)


async def test_a_client_that_knows_nothing_lists_and_calls_everything(served: Served) -> None:
    def ask() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            tool = Grpcurl(channel)
            methods = {service: tool.list(service) for service in tool.list()}
            assert methods == {
                "grpc.health.v1.Health": ["Check", "List", "Watch"],
                "grpc.reflection.v1alpha.ServerReflection": ["ServerReflectionInfo"],
                "sglang.grpc.encoder.SglangEncoder": ["Encode", "Send", "SchedulerReceiveUrl"],
                "spmd_encoder.v1.Encoder": ["Encode", "Lookup", "Models", "Info"],
            }
            items = [{"data": base64.b64encode(picture_file(7)).decode()}]
            reply = tool.call("spmd_encoder.v1.Encoder/Encode", {"items": items, "output": "OUTPUT_POOLED"})
            embedding = reply["results"][0]["embedding"]
            assert struct.unpack("<2f", base64.b64decode(embedding["data"])) == (7, 9)
            assert tool.call("spmd_encoder.v1.Encoder/Models", {})["models"][0]["id"] == "fake"
            assert tool.call("spmd_encoder.v1.Encoder/Info", {})["info"]["layout"]["dp_size"] == 2
            assert tool.call("grpc.health.v1.Health/Check", {}) == {"status": "SERVING"}
            with pytest.raises(grpc.RpcError):  # it knows of no such request
                tool.call("sglang.grpc.encoder.SglangEncoder/Send", {"req_id": "r"})

    await asyncio.to_thread(ask)


async def test_reflection_answers_noise_and_what_is_not_there(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    raw = served.client.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    for data in (b"\xff\xff\xff", b"\x0a\x02\xff\xff", b"", b"\x1a\x05no.pe"):
        call = raw()
        await call.write(data)
        await call.done_writing()
        reply = reflection_pb2.ServerReflectionResponse.FromString(await asyncio.wait_for(call.read(), 30))
        assert reply.error_response.error_code in (
            grpc.StatusCode.INVALID_ARGUMENT.value[0],
            grpc.StatusCode.NOT_FOUND.value[0],
        )
    assert not caplog.records
    stub = reflection_pb2_grpc.ServerReflectionStub(served.client.channel)
    replies = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    assert len((await replies.read()).list_services_response.service) == 4


# -- grpc-health-probe


async def test_health_as_the_probe_asks_it(served: Served) -> None:
    """With the stub of the health protocol's own package."""
    stub = health_pb2_grpc.HealthStub(served.client.channel)
    assert (
        await stub.Check(health_pb2.HealthCheckRequest(service=""))
    ).status == health_pb2.HealthCheckResponse.SERVING
    for service in ("unknown", "spmd_encoder.v1.encoder", " ", "x" * 10_000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="unknown"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    served.service.state = replace(READY, draining=True)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_a_watcher_that_goes_leaves_nothing(served: Served) -> None:
    for _ in range(20):
        watch = served.client.watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await served.until(lambda: not served.front_end._health._watches)


# -- many at once


async def test_64_streams_of_calls_at_once_with_some_cancelled_in_every_stage(served: Served) -> None:
    """Each stream makes one call after another; every call that is not cancelled has its own answer."""
    answered = 0

    async def stream(number: int) -> None:
        nonlocal answered
        rng = random.Random(number)
        for turn in range(6):
            width = (number * 7 + turn) % 50 + 1
            call = served.client.encode(pb.EncodeRequest(items=data_items(picture_file(width), b"bad")))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.05))
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                    raise asyncio.CancelledError  # it was faster
                continue
            good, bad = (await call).results
            assert struct.unpack("<2f", good.embedding.data)[0] == width
            assert bad.error.code == "MEDIA_UNSUPPORTED"
            answered += 1

    await asyncio.gather(*(stream(number) for number in range(64)))
    assert answered > 200
    await served.until(lambda: not served.service.reserved and not served.front_end._calls._busy)


async def test_64_connections_at_once(served: Served) -> None:
    async def one(number: int) -> None:
        async with GrpcClient(served.port) as client:
            (result,) = (await client.encode(pb.EncodeRequest(items=data_items(picture_file(number + 1))))).results
            assert struct.unpack("<2f", result.embedding.data)[0] == number + 1

    await asyncio.gather(*(one(number) for number in range(64)))


async def test_a_call_that_is_cancelled_before_its_message_or_in_its_midst(served: Served) -> None:
    """No message, a message without an end of the stream, two messages: none is left open."""
    encode = served.client.channel.stream_stream("/spmd_encoder.v1.Encoder/Encode")
    message = pb.EncodeRequest(items=data_items(picture_file(3))).SerializeToString()
    served.service.gate.clear()
    calls = []
    for count in (0, 1, 2):
        call = encode()
        for _ in range(count):
            await call.write(message)
        calls.append(call)
    await served.until(lambda: len(served.service.seen) == 2)
    for call in calls:
        call.cancel()
    await served.until(lambda: not served.service.reserved and not served.front_end._calls._busy)
    assert len(served.service.cancelled) == 2
    served.service.gate.set()
    assert await served.widths(picture_file(8)) == [8]
