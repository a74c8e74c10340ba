"""`destination` of the gRPC service's `Encode`: real sockets and files behind a real server over a fake service."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import safetensors.numpy

from spmd_encoder.api.types import ItemOutcome, MediaItem, OutputKind
from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.config import Config
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from tests.harness.fake_service import FakeService, picture_file, size_embedding
from tests.harness.grpc_client import data_items
from tests.unit.test_grpc_encode import Served, serve

pytestmark = pytest.mark.timeout(60)

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


def rows(item: MediaItem) -> ItemOutcome:
    """One row per pixel of height, each `[width, number of the row]`."""
    data = b"".join(struct.pack("<2f", item.width, row) for row in range(item.height))
    return replace(
        size_embedding(item), kind=OutputKind.TOKENS, shape=(item.height, 2), num_tokens=item.height, data=data
    )


@asynccontextmanager
async def serving(folder: Path | None = None, *, max_staged_bytes: int = 2**30) -> AsyncIterator[Served]:
    base, service = Config(), FakeService()
    service.answer = rows
    destinations = replace(base.destinations, embedding_dir=str(folder) if folder else None)
    sglang = replace(base.sglang, max_staged_bytes=max_staged_bytes)
    async with serve(service, replace(base, destinations=destinations, sglang=sglang)) as served:
        yield served


def request(to: pb.Destination, *files: bytes, output: pb.Output = pb.OUTPUT_UNSPECIFIED) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=data_items(*(files or (picture_file(5),))), destination=to, output=output)


async def test_inline_is_the_default() -> None:
    async with serving() as served:
        reply = await served.client.encode(request(pb.Destination(inline=pb.Inline())))
        assert not reply.results[0].embedding.HasField("delivered")
        assert len(reply.results[0].embedding.data) == 72
        plain = await served.client.encode(pb.EncodeRequest(items=data_items(picture_file(5))))
        assert plain.results == reply.results


async def test_files_are_named_by_hash_or_digest(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        to = pb.Destination(file=pb.ToFiles(mm_hashes=["one", "", "bad"]))
        reply = await served.client.encode(request(to, picture_file(5), picture_file(6), b"no picture"))
        one, two = (result.embedding for result in reply.results[:2])
        assert reply.results[2].error.code == "MEDIA_UNSUPPORTED"
        assert (one.delivered.num_bytes, one.data) == (72, b"")
        assert (one.delivered.file.mm_hash, one.delivered.file.path) == ("one", "one/encoder_cache.safetensors")
        assert two.delivered.file.mm_hash == two.digest.removeprefix("sha256:")
        assert (list(one.shape), one.dtype, one.output) == ([9, 2], "float32", pb.OUTPUT_TOKENS)
        tensors = safetensors.numpy.load_file(tmp_path / one.delivered.file.path)
        assert tensors["ec_cache"].tolist() == [[5, row] for row in range(9)]
        by_digest = await served.client.encode(request(pb.Destination(file=pb.ToFiles()), picture_file(6)))
        assert by_digest.results[0].embedding.delivered == two.delivered
        assert {seen.output for seen in served.service.seen} == {OutputKind.TOKENS}


async def test_every_item_is_pushed_failures_too() -> None:
    async with serving() as served:
        with EmbeddingReceiver() as receiver:
            to = pb.Destination(zmq=pb.ToReceiver(endpoint=receiver.endpoint, part=pb.Part(id="r-1", index=1, count=3)))
            reply = await served.client.encode(request(to, picture_file(5), b"no picture"))
            good, bad = reply.results
            assert (good.embedding.delivered.zmq.endpoint, good.embedding.data) == (receiver.endpoint, b"")
            assert bad.error.code == "MEDIA_UNSUPPORTED"
            header, array = receiver.receive(10)
            assert header.part is not None
            assert (header.part.id, header.part.index, header.part.count) == ("r-1", 1, 3)
            assert array.tolist() == [[5, row] for row in range(9)]
            header, array = receiver.receive(10)
            assert header.error is not None and (header.error.code, array) == ("MEDIA_UNSUPPORTED", None)


async def test_a_receiver_that_is_not_there_is_its_items_failure() -> None:
    async with serving() as served:
        to = pb.Destination(zmq=pb.ToReceiver(endpoint="tcp://127.0.0.1:1", part=pb.Part(id="x")))
        reply = await served.client.encode(request(to))
        assert (reply.results[0].error.code, reply.results[0].error.param) == ("DELIVERY_FAILED", "items[0]")


async def test_what_is_staged_is_here_until_it_is_released() -> None:
    async with serving(max_staged_bytes=10_000) as served:
        reply = await served.client.encode(request(pb.Destination(staged=pb.Staged())))
        receipt = reply.results[0].embedding.delivered
        shelf = served.front_end.shared.destinations.shelf
        with shelf.reading(receipt.staged.staged_id) as embedding:
            assert len(embedding.data) == receipt.num_bytes == 72
        more = await served.client.encode(request(pb.Destination(staged=pb.Staged()), *[picture_file(6)] * 2))
        assert [result.WhichOneof("outcome") for result in more.results] == ["embedding", "error"]
        assert more.results[1].error.code == "OVERLOADED"


@pytest.mark.parametrize(
    ("to", "param"),
    [
        (pb.Destination(), "destination"),
        (pb.Destination(file=pb.ToFiles(mm_hashes=["a", "b"])), "destination.mm_hashes"),
        (pb.Destination(file=pb.ToFiles(mm_hashes=["../x"])), "destination.mm_hashes[0]"),
        (pb.Destination(zmq=pb.ToReceiver()), "destination.endpoint"),
        (pb.Destination(zmq=pb.ToReceiver(endpoint="ipc:///tmp/x")), "destination.endpoint"),
        *(
            (pb.Destination(zmq=pb.ToReceiver(endpoint="tcp://h:5", part=part)), "destination.part")
            for part in (pb.Part(), pb.Part(id="x" * 129), pb.Part(id="x", index=1), pb.Part(id="x", count=2**31))
        ),
    ],
)
async def test_what_is_no_destination_is_refused_before_any_work(
    tmp_path: Path, to: pb.Destination, param: str
) -> None:
    async with serving(tmp_path) as served:
        assert await served.refused(request(to)) == (*INVALID, param)
        assert not served.service.seen


async def test_files_hold_rows_and_need_the_flag(tmp_path: Path) -> None:
    to = pb.Destination(file=pb.ToFiles())
    async with serving(tmp_path) as served:
        assert await served.refused(request(to, output=pb.OUTPUT_POOLED)) == (*INVALID, "output")
    async with serving() as served:
        assert await served.refused(request(to)) == (*INVALID, "destination")
