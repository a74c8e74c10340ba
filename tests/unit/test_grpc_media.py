"""Sounds and films over gRPC."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from spmd_encoder.api.types import Detail, Embedding, HeldResult, ItemOptions, MediaItem, Modality, OutputKind
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.media.frames import pack, unpack
from tests.harness.fake_service import picture_file, size_embedding
from tests.harness.media import tone, wav
from tests.unit.test_grpc_encode import Served, served

__all__ = ["served"]
pytestmark = pytest.mark.timeout(60)

SOUND = wav(tone(1600, 16_000), 16_000)
FILM = pack([picture_file(3), picture_file(4)], 2.0)
DIGEST = "sha256:" + "a" * 64
HELD = HeldResult(kind=OutputKind.TOKENS, shape=(4, 2), dtype="float32", num_tokens=4, grid=None)


def answer(item: MediaItem) -> Embedding:
    details: dict[str, Detail] = {"audio_feature_length": 10, "timestamps": [0.25, 1.0]}
    return replace(size_embedding(item), details={} if item.modality is Modality.IMAGE else details)


async def encoded(served: Served, *items: pb.Item) -> Any:
    served.service.answer = answer
    return (await served.client.encode(pb.EncodeRequest(items=items))).results


async def test_modality_options_and_details(served: Served) -> None:
    results = await encoded(
        served,
        pb.Item(data=picture_file(3)),
        pb.Item(data=SOUND, modality=pb.MODALITY_AUDIO),
        pb.Item(data=FILM, modality=pb.MODALITY_VIDEO, fps=4, max_frames=8),
        pb.Item(frames=pb.Frames(files=[picture_file(3), picture_file(4)]), modality=pb.MODALITY_VIDEO, fps=8),
    )
    got = [result.embedding for result in results]
    assert [embedding.modality for embedding in got] == [
        *(pb.MODALITY_IMAGE, pb.MODALITY_AUDIO, pb.MODALITY_VIDEO, pb.MODALITY_VIDEO)
    ]
    assert not got[0].HasField("details")
    assert MessageToDict(got[1].details) == {"audio_feature_length": 10, "timestamps": [0.25, 1.0]}
    items = served.service.seen[0].items
    assert items[2].options == ItemOptions(fps=4, max_frames=8)
    assert (items[3].options, unpack(items[3].data).fps) == (ItemOptions(), 8)
    assert items[1].seconds == 0.1


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (pb.Item(data=SOUND, modality=pb.MODALITY_AUDIO, fps=1), "INVALID_REQUEST"),
        (pb.Item(data=picture_file(3), max_frames=1), "INVALID_REQUEST"),
        (pb.Item(data=FILM, modality=pb.MODALITY_VIDEO, fps=0), "INVALID_REQUEST"),
        (pb.Item(data=FILM, modality=pb.MODALITY_VIDEO, fps=math.nan), "INVALID_REQUEST"),
        (pb.Item(data=FILM, modality=pb.MODALITY_VIDEO, max_frames=0), "INVALID_REQUEST"),
        (pb.Item(data=FILM, modality=9), "INVALID_REQUEST"),  # type: ignore[arg-type]
        (pb.Item(frames=pb.Frames(files=[picture_file(3)])), "INVALID_REQUEST"),
        (pb.Item(frames=pb.Frames(), modality=pb.MODALITY_VIDEO), "INVALID_REQUEST"),
        (
            pb.Item(frames=pb.Frames(files=[picture_file(3)]), modality=pb.MODALITY_VIDEO, max_frames=1),
            "INVALID_REQUEST",
        ),
        (pb.Item(data=picture_file(3), modality=pb.MODALITY_VIDEO), "MEDIA_UNSUPPORTED"),
        (pb.Item(data=b"junk", modality=pb.MODALITY_AUDIO), "MEDIA_UNSUPPORTED"),
    ],
)
async def test_what_cannot_be(served: Served, item: pb.Item, code: str) -> None:
    bad, good = await encoded(served, item, pb.Item(data=picture_file(3)))
    assert (bad.error.code, bad.error.param) == (code, "items[0]")
    assert good.HasField("embedding")


async def test_a_digest_is_looked_up_and_encoded_as_what_it_is_of(served: Served) -> None:
    served.service.held = {f"{DIGEST}?video&fps=4.0": HELD}
    film = pb.LookupRequest(digests=[DIGEST], modality=pb.MODALITY_VIDEO, fps=4)
    assert (await served.client.lookup(film)).results[0].held
    assert not (await served.client.lookup(pb.LookupRequest(digests=[DIGEST]))).results[0].held
    await encoded(served, pb.Item(digest=DIGEST, modality=pb.MODALITY_VIDEO, fps=4))
    assert served.service.seen[0].items[0].key == f"{DIGEST}?video&fps=4.0"


async def test_many_numbers_are_within_what_is_reserved(served: Served) -> None:
    def long(item: MediaItem) -> Embedding:
        return replace(size_embedding(item), details={"timestamps": [n / 3 for n in range(20_000)]})

    served.service.answer = long
    reply = await served.client.encode(pb.EncodeRequest(items=[pb.Item(data=FILM, modality=pb.MODALITY_VIDEO)]))
    assert len(reply.results[0].embedding.details["timestamps"]) == 20_000
