"""The gRPC server's life: health, reflection, its port, drain, and clients that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from spmd_encoder.config import Config
from spmd_encoder.errors import StartupError
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.grpc.server import GrpcFrontEnd
from spmd_encoder.keeper.front import bind_ports
from tests.harness.fake_service import READY, STARTING, FakeService, picture_file
from tests.harness.grpc_client import GrpcClient, data_items, error_info
from tests.unit.test_grpc_encode import Served, serve

pytestmark = pytest.mark.timeout(60)

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponse.SERVICE_UNKNOWN
SERVICES = ["", "spmd_encoder.v1.Encoder", "sglang.grpc.encoder.SglangEncoder"]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve() as found:
        yield found


# -- health


@pytest.mark.parametrize("service", SERVICES)
async def test_check_says_what_readiness_is_now(served: Served, service: str) -> None:
    request = HealthCheckRequest(service=service)
    assert (await served.client.check(request)).status == SERVING
    for state in (STARTING, replace(READY, ready=False, replicas_ready=0), replace(READY, draining=True)):
        served.service.state = state
        assert (await served.client.check(request)).status == NOT_SERVING
    served.service.state = READY
    assert (await served.client.check(request)).status == SERVING


async def test_check_of_an_unknown_service_is_not_found(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.check(HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_list_has_every_service(served: Served) -> None:
    statuses = (await served.client.list(HealthListRequest())).statuses
    assert {name: reply.status for name, reply in statuses.items()} == dict.fromkeys(SERVICES, SERVING)


async def test_watch_follows_a_start_a_loss_a_return_and_a_drain() -> None:
    service = FakeService()
    service.state = STARTING
    async with serve(service) as served:
        watch = served.client.watch(HealthCheckRequest(service="spmd_encoder.v1.Encoder"))
        other = served.client.watch(HealthCheckRequest(service="other"))
        assert (await other.read()).status == SERVICE_UNKNOWN
        assert (await watch.read()).status == NOT_SERVING
        for state, status in [
            (READY, SERVING),
            (replace(READY, ready=False, replicas_ready=0), NOT_SERVING),
            (READY, SERVING),
            (replace(READY, draining=True), NOT_SERVING),
        ]:
            service.state = state
            assert (await watch.read()).status == status


async def test_watchers_are_told_of_the_end_and_do_not_hold_it_up(served: Served) -> None:
    watches = [served.client.watch(HealthCheckRequest()) for _ in range(5)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    served.front_end.stop(30)
    for watch in watches:
        assert (await watch.read()).status == NOT_SERVING
    await asyncio.wait_for(served.serving, 30)


# -- reflection


async def test_reflection_tells_services_and_messages(served: Served) -> None:
    def ask() -> tuple[list[str], list[str]]:
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName("spmd_encoder.v1.Encoder")
            return sorted(database.get_services()), [method.name for method in service.methods]

    services, methods = await asyncio.to_thread(ask)
    assert set(services) == {*SERVICES[1:], "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert methods == ["Encode", "Lookup", "Models", "Info"]


# -- the port


def test_ports_are_bound_together_or_not_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf":{port} is taken .* --grpc-port") as caught:
            bind_ports(replace(Config().server, port=0, grpc_port=port))
        assert caught.value.exit_code == 3
    socks = bind_ports(replace(Config().server, port=0, grpc_port=0))
    assert set(socks) == {"http", "grpc"}
    for sock in socks.values():
        sock.close()
    socks = bind_ports(replace(Config().server, port=0))
    assert set(socks) == {"http"}
    socks["http"].close()


async def test_no_second_server_shares_the_port(served: Served) -> None:
    sock = socket.socket()  # neither bound nor listening: its name is all that is asked for
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with pytest.raises(OSError):
        sock.bind(("127.0.0.1", served.port))
    sock.close()


async def test_a_port_that_is_lost_on_the_way_is_one_sentence() -> None:
    class Stolen(socket.socket):
        """Another process takes the address as soon as it is free."""

        def close(self) -> None:
            name = self.getsockname()
            super().close()
            if name[1] and not thieves:
                thieves.append(socket.create_server(name))

    thieves: list[socket.socket] = []
    sock = Stolen()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    with pytest.raises(StartupError, match=r"gRPC cannot listen on 127\.0\.0\.1") as caught:
        GrpcFrontEnd(FakeService(), Config(), sock)
    assert caught.value.exit_code == 3
    thieves[0].close()


# -- the end


async def test_a_drain_sends_the_replies_in_flight(served: Served) -> None:
    call = await served.hanging(picture_file(6))
    served.front_end.stop(10)
    await asyncio.sleep(0.2)
    assert not served.serving.done()
    async with GrpcClient(served.port) as late:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.models(pb.ModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    served.service.gate.set()
    assert (await call).results[0].HasField("embedding")
    await asyncio.wait_for(served.serving, 30)


async def test_a_drain_sends_large_replies_whole(served: Served) -> None:
    data = bytes(20_000_000)
    answer = served.service.answer
    served.service.answer = lambda item: replace(answer(item), data=data, shape=(5_000_000,))  # type: ignore[type-var]
    calls = [await served.hanging(picture_file(6 + number)) for number in range(3)]
    served.front_end.stop(10)
    served.service.gate.set()
    for call in calls:
        assert (await call).results[0].embedding.data == data
    await asyncio.wait_for(served.serving, 30)


async def test_what_the_drain_cuts_off_is_told_why(served: Served) -> None:
    call = await served.hanging()
    served.front_end.stop(0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert (caught.value.code(), error_info(caught.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await asyncio.wait_for(served.serving, 30)
    assert len(served.service.cancelled) == 1


async def test_cancelling_serve_ends_all_at_once() -> None:
    service, sock = FakeService(), socket.create_server(("127.0.0.1", 0))
    service.gate.clear()
    port = sock.getsockname()[1]
    serving = asyncio.create_task(GrpcFrontEnd(service, Config(), sock).serve())
    async with GrpcClient(port) as client:
        call = client.encode(pb.EncodeRequest(items=data_items(picture_file(5))), wait_for_ready=True)
        await asyncio.wait_for(service.arrived.wait(), 30)
        serving.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert len(service.cancelled) == 1


async def test_stop_before_serve() -> None:
    front_end = GrpcFrontEnd(FakeService(), Config(), socket.create_server(("127.0.0.1", 0)))
    front_end.stop(1)
    await asyncio.wait_for(front_end.serve(), 30)


# -- clients that misbehave


async def test_a_caller_that_reads_nothing_does_not_hold_up_the_end(served: Served) -> None:
    answer = served.service.answer
    served.service.answer = lambda item: replace(answer(item), data=bytes(50_000_000))  # type: ignore[type-var]
    call = served.client.channel.stream_stream("/spmd_encoder.v1.Encoder/Encode")()
    await call.write(pb.EncodeRequest(items=data_items(picture_file(3))).SerializeToString())
    await served.until(lambda: served.service.seen)
    served.front_end.stop(0.2)
    await asyncio.wait_for(served.serving, 30)


async def test_garbage_on_the_port_harms_nobody(served: Served) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096, b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(garbage)
        if garbage:
            await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert await served.widths(picture_file(3)) == [3]


async def test_a_message_that_grows_when_unpacked_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(config=replace(Config(), server=replace(Config().server, max_body_bytes=1_000_000))) as served:
        request = pb.EncodeRequest(items=data_items(bytes(200_000_000)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.encode(request, compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await served.widths(picture_file(3)) == [3]
    assert not caplog.records
