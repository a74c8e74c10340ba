"""SGLang's service over gRPC, with real PULL sockets as receivers, alone and beside HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from spmd_encoder.api.types import Embedding, MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import FrontEnd
from spmd_encoder.frontends.grpc.protos import sglang_pb2 as pb
from spmd_encoder.frontends.grpc.server import GrpcFrontEnd
from spmd_encoder.frontends.http.server import HttpFrontEnd
from spmd_encoder.frontends.shared import Shared
from spmd_encoder.keeper.starter import SpawnStarter
from spmd_encoder.transports.registry import load_writer
from tests.harness.fake_service import FakeService, failing, picture
from tests.harness.grpc_client import GrpcClient, error_info
from tests.harness.landing import FAKE_MOONCAKE, Landing
from tests.harness.sglang_receiver import Receiver

pytestmark = pytest.mark.timeout(60)


def rows_of(item: MediaItem) -> Embedding:
    """`width` rows of (width, height)."""
    return Embedding(
        modality=item.modality,
        kind=OutputKind.TOKENS,
        shape=(item.width, 2),
        dtype="float32",
        num_tokens=item.width,
        digest=item.digest,
        data=np.array([[item.width, item.height]] * item.width, np.float32).tobytes(),
        grid=(1, 2, item.width * 2),
        replica=0,
    )


def wanted(*widths: int) -> np.ndarray[Any, Any]:
    return np.array([(width, 9) for width in widths for _ in range(width)], np.float32)


@dataclass
class Served:
    service: FakeService
    client: GrpcClient
    http: httpx.AsyncClient
    shared: Shared

    def encode(self, *widths: int, part: str = "p", ports: tuple[int, ...] = ()) -> Any:
        request = pb.EncodeRequest(
            mm_items=[picture(width) for width in widths],
            req_id=part,
            num_parts=1,
            part_idx=0,
            prefill_host="127.0.0.1",
            embedding_port=ports,
        )
        return self.client.sglang_encode(request)

    def register(self, receiver: Receiver, part: str = "p", count: int = 1) -> Any:
        return self.client.sglang_register(
            pb.SchedulerReceiveUrlRequest(req_id=part, receive_url=receiver.url, receive_count=count)
        )

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serve(backend: str) -> AsyncIterator[Served]:
    service = FakeService()
    service.answer = rows_of
    config = replace(Config(), sglang=replace(Config().sglang, encoder_transfer_backend=backend))
    shared = Shared.open(service, config, writer=load_writer(config, SpawnStarter(), "127.0.0.1"))
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [sock.getsockname()[1] for sock in socks]
    front_ends: list[FrontEnd] = [
        GrpcFrontEnd(service, config, socks[0], shared=shared),
        HttpFrontEnd(service, config, socks[1], shared=shared),
    ]
    serving = [asyncio.create_task(front_end.serve()) for front_end in front_ends]
    url = f"http://127.0.0.1:{ports[1]}"
    async with GrpcClient(ports[0]) as client, httpx.AsyncClient(base_url=url, timeout=20) as http:
        yield Served(service, client, http, shared)
    service.gate.set()
    for front_end in front_ends:
        front_end.stop(1)
    await asyncio.wait_for(asyncio.gather(*serving), 30)
    await shared.close()
    assert not service.reserved


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve("zmq_to_scheduler") as found:
        yield found


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), error_info(caught.value)[0]


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
async def test_every_registered_receiver_gets_the_rows(served: Served, early: bool) -> None:
    with Receiver() as one, Receiver() as two:
        if early:
            waiting = [served.register(one, count=2), served.register(two, count=2)]
            await served.until(lambda: served.shared.dialect.num_parts)
            encode = served.encode(3, 2)
        else:
            encode = served.encode(3, 2)
            await served.until(lambda: served.shared.dialect.staged_bytes)
            waiting = [served.register(one, count=2), served.register(two, count=2)]
        reply = await encode
        await asyncio.gather(*waiting)
        assert (reply.embedding_size, reply.embedding_len, reply.embedding_dim) == (40, 5, 2)
        for receiver in (one, two):
            message = await receiver.message()
            assert message.head.req_id == "p"
            assert np.array_equal(message.values(), wanted(3, 2))
            assert await receiver.nothing_more()


async def test_ports_of_the_request_get_the_rows() -> None:
    async with serve("zmq_to_tokenizer") as served:
        with Receiver() as receiver:
            await served.encode(4, ports=(receiver.port,))
            assert np.array_equal((await receiver.message()).values(), wanted(4))
            assert await refusal(served.register(receiver)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert await refusal(served.encode(4, part="q")) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_a_part_registered_over_grpc_is_encoded_over_http(served: Served) -> None:
    body = {"mm_items": [picture(3)], "num_parts": 1, "part_idx": 0, "req_id": "p", "modality": "IMAGE"}
    with Receiver() as receiver:
        waiting = served.register(receiver)
        await served.until(lambda: served.shared.dialect.num_parts)
        assert (await served.http.post("/encode", json=body)).status_code == 200
        await waiting
        assert np.array_equal((await receiver.message()).values(), wanted(3))


async def test_a_part_registered_over_http_is_encoded_over_grpc(served: Served) -> None:
    with Receiver() as receiver:
        encode = served.encode(3)
        await served.until(lambda: served.shared.dialect.staged_bytes)
        body = {"req_id": "p", "receive_url": receiver.url, "receive_count": 1}
        assert (await served.http.post("/scheduler_receive_url", json=body)).status_code == 200
        await encode
        assert np.array_equal((await receiver.message()).values(), wanted(3))


async def test_failures_are_told_to_caller_and_receiver(served: Served) -> None:
    served.service.answer = failing(EncoderError(ErrorCode.MEDIA_CORRUPT, "it is broken"), width=3)
    with Receiver() as receiver:
        encode = served.encode(3)
        assert await refusal(encode) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        await served.register(receiver)
        assert (await receiver.message()).head.error_code == 400


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.TOO_LARGE, (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")),
        (ErrorCode.QUEUE_FULL, (grpc.StatusCode.UNAVAILABLE, "OVERLOADED")),
        (ErrorCode.DELIVERY_FAILED, (grpc.StatusCode.ABORTED, "DELIVERY_FAILED")),
        (ErrorCode.DEADLINE_EXCEEDED, (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")),
        (ErrorCode.INTERNAL, (grpc.StatusCode.INTERNAL, "INTERNAL")),
    ],
)
async def test_statuses(served: Served, code: ErrorCode, told: tuple[grpc.StatusCode, str]) -> None:
    served.service.refusal = EncoderError(code, "said by the service")
    assert await refusal(served.encode(3)) == told


async def test_an_active_id_with_another_body_is_refused(served: Served) -> None:
    encode = served.encode(3)
    await served.until(lambda: served.shared.dialect.staged_bytes)
    assert await refusal(served.encode(4)) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    encode.cancel()


async def test_fields_are_checked(served: Served) -> None:
    invalid = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    good = {"mm_items": [picture(3)], "req_id": "p", "num_parts": 1, "part_idx": 0}
    for changes in ({"req_id": ""}, {"num_parts": 0}, {"part_idx": 1}, {"mm_items": []}, {"mm_items": ["/a/b.png"]}):
        assert (await refusal(served.client.sglang_encode(pb.EncodeRequest(**{**good, **changes}))))[0] in (
            grpc.StatusCode.INVALID_ARGUMENT,
        ), changes
    url = pb.SchedulerReceiveUrlRequest(req_id="p", receive_url="nowhere", receive_count=1)
    assert await refusal(served.client.sglang_register(url)) == invalid
    assert await refusal(served.client.sglang_send(pb.SendRequest(req_id="p"))) == invalid
    with pytest.raises(grpc.aio.AioRpcError, match="zmq_to_scheduler"):
        await served.client.sglang_send(pb.SendRequest(req_id="p"))


async def test_registrations_do_not_wait_for_encodes(served: Served) -> None:
    served.service.gate.clear()
    encodes = [served.encode(3, part=f"p{number}") for number in range(100)]
    await served.until(lambda: len(served.service.seen) == 100)
    with Receiver() as receiver:
        await asyncio.gather(*(served.register(receiver, part=f"p{number}") for number in range(100)))
        served.service.gate.set()
        await asyncio.gather(*encodes)
        assert {(await receiver.message()).head.req_id for _ in range(100)} == {f"p{number}" for number in range(100)}


async def test_media_are_held_until_the_part_is_encoded_and_no_longer(served: Served) -> None:
    served.service.gate.clear()
    encode = served.encode(3)
    await served.until(lambda: served.service.seen)
    assert served.service.reserved
    served.service.gate.set()
    await served.until(lambda: served.shared.dialect.staged_bytes)
    await served.until(lambda: not served.service.reserved)
    assert not encode.done()
    encode.cancel()


async def test_send_writes_into_the_receivers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_MOONCAKE))
    async with serve("mooncake") as served:
        sizes = await served.encode(3, 5)
        with Landing() as landing:
            body = landing.body(req_id="p")
            del body["receive_count"]
            await served.client.sglang_send(pb.SendRequest(**body))
            rows = wanted(3, 5)
            assert sizes.embedding_size == rows.nbytes
            assert landing.buffer[: rows.nbytes].tobytes() == rows.tobytes()
            assert (await landing.messages.message()).rows is None
