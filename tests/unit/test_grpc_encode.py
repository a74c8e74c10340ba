"""`spmd_encoder.v1.Encoder` over a real server on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from spmd_encoder.api.types import Embedding, MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.grpc.calls import DEFAULT_TIMEOUTS, Timeouts
from spmd_encoder.frontends.grpc.errors import STATUS
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.grpc.server import GrpcFrontEnd
from tests.harness.fake_service import STARTING, FakeService, failing, picture, picture_file, size_embedding
from tests.harness.grpc_client import GrpcClient, data_items, error_info, metadata_of

pytestmark = pytest.mark.timeout(60)


@dataclass
class Served:
    service: FakeService
    client: GrpcClient
    front_end: GrpcFrontEnd
    serving: asyncio.Task[None]
    port: int

    async def widths(self, *files: bytes, **fields: Any) -> list[float | str]:
        """Each item's width as its embedding has it, or its error's code."""
        reply = await self.client.encode(pb.EncodeRequest(items=data_items(*files), **fields))
        return [
            struct.unpack("<2f", result.embedding.data)[0] if result.HasField("embedding") else result.error.code
            for result in reply.results
        ]

    async def refused(self, request: pb.EncodeRequest, **options: Any) -> tuple[grpc.StatusCode, str, str | None]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.client.encode(request, **options)
        code, param, _ = error_info(caught.value)
        return caught.value.code(), code, param

    async def hanging(self, *files: bytes, **options: Any) -> Any:
        """A call whose items have reached the service, which does not answer."""
        self.service.gate.clear()
        self.service.arrived.clear()
        call = self.client.encode(pb.EncodeRequest(items=data_items(*(files or (picture_file(5),)))), **options)
        await asyncio.wait_for(self.service.arrived.wait(), 30)
        return call

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serve(
    service: FakeService | None = None, config: Config | None = None, timeouts: Timeouts = DEFAULT_TIMEOUTS
) -> AsyncIterator[Served]:
    service = service or FakeService()
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    front_end = GrpcFrontEnd(service, config or Config(), sock, timeouts=timeouts)
    serving = asyncio.create_task(front_end.serve())
    async with GrpcClient(port) as client:
        yield Served(service, client, front_end, serving, port)
    service.gate.set()
    front_end.stop(1)
    await asyncio.wait_for(serving, 30)
    assert not service.reserved


def with_server(**changes: Any) -> Config:
    return replace(Config(), server=replace(Config().server, **changes))


def with_limits(**changes: Any) -> Config:
    return replace(Config(), limits=replace(Config().limits, **changes))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve() as found:
        yield found


async def test_an_embedding_has_all_that_http_tells(served: Served) -> None:
    file = picture_file(7)
    call = served.client.encode(
        pb.EncodeRequest(items=data_items(file), output=pb.OUTPUT_POOLED, request_id="r 1", model="fake")
    )
    reply = await call
    assert (reply.request_id, reply.model, len(reply.results)) == ("r 1", "fake", 1)
    got = reply.results[0].embedding
    assert (list(got.shape), got.dtype, list(got.grid), got.num_tokens) == ([2], "float32", [1, 1, 1], 1)
    assert (got.modality, got.output, got.cached) == (pb.MODALITY_IMAGE, pb.OUTPUT_POOLED, False)
    assert got.digest == "sha256:" + hashlib.sha256(file).hexdigest()
    assert struct.unpack("<2f", got.data) == (7, 9)
    trailing = metadata_of(await call.trailing_metadata())
    assert (trailing["x-spmd-replica"], trailing["x-request-id"], trailing["x-spmd-cached"]) == ("0", "r 1", "0")
    assert "forward;dur=3.00" in trailing["server-timing"]
    request = served.service.seen[0]
    assert (request.request_id, request.output, request.items[0].data) == ("r 1", OutputKind.POOLED, file)


async def test_bytes_and_urls_mix_and_keep_their_order(served: Served) -> None:
    items = [
        pb.Item(data=picture_file(3)),
        pb.Item(url=picture(40)),
        pb.Item(url="https://127.0.0.1/a.png"),
        pb.Item(data=b"no picture"),
        pb.Item(),
        pb.Item(data=b""),
        pb.Item(data=picture_file(5), modality=pb.MODALITY_IMAGE),
        pb.Item(data=picture_file(5), modality=pb.MODALITY_VIDEO),
    ]
    reply = await served.client.encode(pb.EncodeRequest(items=items))
    widths = [struct.unpack("<2f", r.embedding.data)[0] for r in reply.results if r.HasField("embedding")]
    assert widths == [3, 40, 5]
    assert [(r.error.code, r.error.param) for r in reply.results if r.HasField("error")] == [
        ("FETCH_FORBIDDEN", "items[2]"),
        ("MEDIA_UNSUPPORTED", "items[3]"),
        ("INVALID_REQUEST", "items[4]"),
        ("INVALID_REQUEST", "items[5]"),
        ("MEDIA_UNSUPPORTED", "items[7]"),
    ]


async def test_a_request_id_comes_from_the_message_the_metadata_or_here(served: Served) -> None:
    request = pb.EncodeRequest(items=data_items(picture_file(3)))
    assert (await served.client.encode(request, metadata=[("x-request-id", "header")])).request_id == "header"
    assert (await served.client.encode(request)).request_id.startswith("enc-")
    request.request_id = "body"
    assert (await served.client.encode(request, metadata=[("x-request-id", "header")])).request_id == "body"
    request.request_id = "ä"
    assert await served.refused(request) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "request_id")


async def test_requests_that_are_refused(served: Served) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    items = data_items(picture_file(3))
    assert await served.refused(pb.EncodeRequest()) == (invalid, "INVALID_REQUEST", "items")
    assert await served.refused(pb.EncodeRequest(items=items * 257)) == (invalid, "TOO_LARGE", "items")
    assert await served.refused(pb.EncodeRequest(items=items, output=9)) == (invalid, "INVALID_REQUEST", "output")  # type: ignore[arg-type]
    other = pb.EncodeRequest(items=items, model="other")
    assert await served.refused(other) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "model")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.raw(b"\xff\xff\xff")
    assert error_info(caught.value)[0] == "INVALID_REQUEST"
    assert served.service.seen == []


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_every_code_has_its_status_and_details(served: Served, code: ErrorCode) -> None:
    served.service.refusal = EncoderError(code, "said by the service", param="items[3]", retry_after_s=2.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(3))))
    assert (caught.value.code(), caught.value.details()) == (STATUS[code], "said by the service")
    again = 2.5 if STATUS[code] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED) else None
    assert error_info(caught.value) == (code, "items[3]", again)
    assert metadata_of(caught.value.trailing_metadata())["x-spmd-replica"] == "none"


async def test_a_fault_of_the_server_says_nothing_of_its_inside(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.service.refusal = RuntimeError("secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(3))))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text


async def test_a_long_message_is_clipped_to_what_metadata_hold(served: Served) -> None:
    served.service.refusal = EncoderError(ErrorCode.INVALID_REQUEST, "ü" * 50_000, param="x" * 50_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(3))))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith("üüü")
    assert error_info(caught.value)[0] == "INVALID_REQUEST"


async def test_many_calls_at_once_each_get_their_own(served: Served) -> None:
    async def one(number: int) -> None:
        width = number % 50 + 1
        files = [picture_file(width), b"bad", picture_file(width + 1)]
        assert await served.widths(*files) == [width, "MEDIA_UNSUPPORTED", width + 1]

    await asyncio.gather(*(one(number) for number in range(64)))
    assert len(served.service.seen) == 64


async def test_models_and_info(served: Served) -> None:
    (model,) = (await served.client.models(pb.ModelsRequest())).models
    assert (model.id, model.dtype, dict(model.embedding_dims)) == ("fake", "float32", {"tokens": 2, "pooled": 2})
    assert (list(model.outputs), model.default_output) == ([pb.OUTPUT_TOKENS, pb.OUTPUT_POOLED], pb.OUTPUT_POOLED)
    assert model.random_weights and list(model.modalities) == [pb.MODALITY_IMAGE]
    assert (await served.client.info(pb.InfoRequest())).info["layout"]["dp_size"] == 2
    served.service.model = None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.models(pb.ModelsRequest())
    assert (caught.value.code(), error_info(caught.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")


async def test_before_the_start_calls_are_told_to_come_again(served: Served) -> None:
    served.service.state = STARTING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(3))))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error_info(caught.value) == ("NOT_READY", None, 3.0)


# -- time and cancelling


async def test_a_cancelled_call_withdraws_its_items(served: Served) -> None:
    call = await served.hanging()
    assert call.cancel()
    await served.until(lambda: served.service.cancelled and not served.service.reserved)
    served.service.gate.set()
    assert await served.widths(picture_file(8)) == [8]


async def test_a_closed_connection_cancels(served: Served) -> None:
    async with GrpcClient(served.port) as other:
        served.service.gate.clear()
        call = other.encode(pb.EncodeRequest(items=data_items(picture_file(5))))
        call.add_done_callback(lambda _: None)
        await asyncio.wait_for(served.service.arrived.wait(), 30)
    await served.until(lambda: served.service.cancelled and not served.service.reserved)


async def test_the_callers_deadline_reaches_the_service_and_ends_the_call(served: Served) -> None:
    call = await served.hanging(timeout=0.4)
    deadline_s = served.service.seen[0].deadline_s
    assert deadline_s is not None and 0 < deadline_s <= 0.4
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.until(lambda: served.service.cancelled)


async def test_the_servers_own_time_limit_counts_where_it_is_shorter() -> None:
    async with serve(config=with_limits(request_timeout_s=7.0)) as served:
        await served.widths(picture_file(3))
        deadline_s = served.service.seen[0].deadline_s
        assert deadline_s is not None and 6 < deadline_s <= 7


async def test_cancelling_in_every_stage(served: Served) -> None:
    """While it is sent, received, parsed, encoded, answered: nothing is left behind, and the server goes on."""
    big = pb.EncodeRequest(items=data_items(*[picture_file(5) + bytes(1_000_000)] * 12))

    def big_embedding(item: MediaItem) -> Embedding:
        return replace(size_embedding(item), data=bytes(3_000_000), shape=(750_000,))

    served.service.answer = big_embedding
    for pause_s in [0.0, 0.001, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.13, 0.2]:
        call = served.client.encode(big)
        await asyncio.sleep(pause_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
            raise asyncio.CancelledError  # it was faster
    await served.until(lambda: not served.service.reserved and not served.front_end._calls._busy)
    served.service.answer = size_embedding
    assert await served.widths(picture_file(8)) == [8]


# -- sizes


async def test_a_message_over_the_limit_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(config=with_server(max_body_bytes=100_000)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.encode(pb.EncodeRequest(items=data_items(bytes(100_001))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await served.widths(picture_file(3)) == [3]
    assert not caplog.records  # a client cannot fill the log


async def test_messages_to_the_server_may_have_a_limit_of_their_own() -> None:
    async with serve(config=with_server(grpc_max_message_bytes=100_000)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.encode(pb.EncodeRequest(items=data_items(bytes(100_001))))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        served.service.answer = lambda item: replace(size_embedding(item), data=bytes(200_000), shape=(50_000,))
        reply = await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(3))))
        assert len(reply.results[0].embedding.data) == 200_000, "replies keep theirs"


async def test_what_cannot_be_accounted_for_is_not_parsed() -> None:
    """Bytes that are no message: what is said of them tells what came first."""
    nonsense = bytes([255]) * 100_000
    async with serve(FakeService(max_inflight_bytes=50_000)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.raw(nonsense)
        assert error_info(caught.value)[0] == "OVERLOADED"
        served.service.max_inflight_bytes = 2**40
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.raw(nonsense)
        assert error_info(caught.value)[0] == "INVALID_REQUEST"


async def test_a_message_without_media_has_a_small_limit(served: Served) -> None:
    info = served.client.channel.unary_unary("/spmd_encoder.v1.Encoder/Info")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await info(bytes(64 * 1024 + 1))
    assert error_info(caught.value)[0] == "TOO_LARGE"


async def test_a_reply_over_the_limit_is_refused() -> None:
    async with serve(config=with_server(max_body_bytes=100_000)) as served:
        served.service.answer = lambda item: replace(size_embedding(item), data=bytes(60_000))
        request = pb.EncodeRequest(items=data_items(picture_file(3), picture_file(4)))
        assert await served.refused(request) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE", None)


async def test_large_replies_arrive_whole(served: Served) -> None:
    data = bytes(range(256)) * 200_000
    served.service.answer = lambda item: replace(size_embedding(item), data=memoryview(data), shape=(len(data) // 4,))
    reply = await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(3))))
    assert reply.results[0].embedding.data == data


async def test_bytes_are_accounted_for_until_the_reply_is_sent() -> None:
    async with serve(FakeService(max_inflight_bytes=2_000_000)) as served:
        call = await served.hanging(picture_file(5) + bytes(1_500_000))
        assert 1_500_000 < served.service.reserved < 2_000_000
        refused = await served.refused(pb.EncodeRequest(items=data_items(bytes(1_000_000))))
        assert refused == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", None)
        served.service.gate.set()
        await call
        await served.until(lambda: not served.service.reserved)


async def test_more_than_is_ever_held_is_not_to_be_tried_again() -> None:
    async with serve(config=with_limits(max_inflight_bytes=100_000)) as served:
        refused = await served.refused(pb.EncodeRequest(items=data_items(bytes(200_000))))
        assert refused == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE", None)


async def test_a_call_without_its_message_is_ended() -> None:
    async with serve(timeouts=Timeouts(receive_s=0.2)) as served:
        stream = served.client.channel.stream_stream("/spmd_encoder.v1.Encoder/Encode")
        call = stream()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert error_info(caught.value)[0] == "DEADLINE_EXCEEDED"
        empty = stream()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await empty.read()
        assert error_info(caught.value)[0] == "INVALID_REQUEST"
        assert await served.widths(picture_file(3)) == [3]


async def test_callers_that_send_nothing_do_not_shut_out_control_calls(served: Served) -> None:
    stream = served.client.channel.stream_stream("/spmd_encoder.v1.Encoder/Encode")
    idle = [stream() for _ in range(100)]
    await asyncio.gather(*(call.wait_for_connection() for call in idle))
    assert (await served.client.models(pb.ModelsRequest(), timeout=5)).models
    for call in idle:
        call.cancel()
    assert await served.widths(picture_file(3)) == [3]


async def test_an_unknown_method_is_unimplemented(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.channel.unary_unary("/spmd_encoder.v1.Encoder/Decode")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_calls_are_counted_by_method_and_code(served: Served) -> None:
    served.service.answer = failing(EncoderError(ErrorCode.MEDIA_CORRUPT, "bad"), width=6)
    await served.widths(picture_file(6))
    await served.refused(pb.EncodeRequest())
    registry, method = served.front_end.shared.registry, "spmd_encoder.v1.Encoder/Encode"

    def calls(code: str) -> float | None:
        return registry.get_sample_value("spmd_encoder_grpc_calls_total", {"method": method, "code": code})

    assert (calls("OK"), calls("INVALID_ARGUMENT")) == (1, 1)
    await served.until(lambda: registry.get_sample_value("spmd_encoder_grpc_calls_in_flight") == 0)
