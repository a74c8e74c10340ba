"""Look-ups and items by digest over gRPC; a delivery within the caller's time."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import grpc
import pytest

from spmd_encoder.api.types import HeldResult, ItemFailure, ItemOutcome, MediaItem, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from tests.harness.fake_service import picture_file, size_embedding
from tests.harness.grpc_client import data_items, error_info
from tests.unit.test_grpc_encode import Served, served

__all__ = ["served"]
pytestmark = pytest.mark.timeout(60)

A, B = (f"sha256:{letter * 64}" for letter in "ab")


@dataclass
class Refused:
    status: grpc.StatusCode
    code: str
    param: str | None


async def refused(served: Served, **fields: object) -> Refused:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.client.lookup(pb.LookupRequest(**fields))  # type: ignore[arg-type]
    code, param, _ = error_info(caught.value)
    return Refused(caught.value.code(), code, param)


async def test_what_is_held(served: Served) -> None:
    served.service.held = {
        A: HeldResult(
            kind=OutputKind.TOKENS, shape=(4, 2), dtype="bfloat16", num_tokens=4, grid=(1, 4, 4), replicas=(1,)
        )
    }
    reply = await served.client.lookup(pb.LookupRequest(digests=[A, B], output=pb.OUTPUT_TOKENS))
    assert reply == pb.LookupResponse(
        model="fake",
        output=pb.OUTPUT_TOKENS,
        results=[
            pb.LookedUp(
                digest=A, held=True, replicas=[1], shape=[4, 2], dtype="bfloat16", num_tokens=4, grid=[1, 4, 4]
            ),
            pb.LookedUp(digest=B),
        ],
    )
    assert (await served.client.lookup(pb.LookupRequest(digests=[A]))).output == pb.OUTPUT_POOLED
    assert served.service.looked_up == [((A, B), OutputKind.TOKENS), ((A,), OutputKind.POOLED)]


async def test_what_is_no_look_up(served: Served) -> None:
    bad, invalid = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"
    assert await refused(served) == Refused(bad, invalid, "digests")
    assert await refused(served, digests=[A, "x"]) == Refused(bad, invalid, "digests[1]")
    assert await refused(served, digests=[A], output=9) == Refused(bad, invalid, "output")
    assert (await refused(served, digests=[A], model="gpt")).code == "MODEL_NOT_FOUND"
    served.service.model = None
    assert (await refused(served, digests=[A])).code == "NOT_READY"


async def test_items_by_digest(served: Served) -> None:
    def answer(item: MediaItem) -> ItemOutcome:
        if item.held:
            return ItemFailure(error=EncoderError(ErrorCode.NOT_FOUND, "no cache holds it"))
        return size_embedding(item)

    served.service.answer = answer
    items = [pb.Item(digest=A), *data_items(picture_file(5)), pb.Item(digest="sha256:1")]
    reply = await served.client.encode(pb.EncodeRequest(items=items))
    assert [result.error.code for result in reply.results] == ["NOT_FOUND", "", "INVALID_REQUEST"]
    assert [item.held for item in served.service.seen[0].items] == [True, False]


async def test_a_delivery_within_the_callers_time(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        to = pb.Destination(zmq=pb.ToReceiver(endpoint=f"tcp://127.0.0.1:{silent.getsockname()[1]}"))
        request = pb.EncodeRequest(items=data_items(picture_file(5)), destination=to)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.client.encode(request, timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
