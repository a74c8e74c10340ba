"""Whatever comes over a socket, its readers give a message or their own error, and never quote what came."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import Modality
from spmd_encoder.client.item_frames import BadFrameError, read_frames
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.base import ItemLimits
from spmd_encoder.frontends.grpc.messages import read_request
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from spmd_encoder.frontends.sglang.refusal import RefusalError
from spmd_encoder.frontends.sglang.requests import read_encode, read_fetch, read_fields, read_registration
from spmd_encoder.transports.item_frames import item_frames
from spmd_encoder.transports.registry import push_backend
from spmd_encoder.wire.codec import Codec, WireError
from spmd_encoder.wire.messages import Beat, FromWorker, Message, TensorSpec
from spmd_encoder.wire.preparing import FromPreparer, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.streams import FrameSocket, Pipe, over_socket
from tests.harness.examples import examples
from tests.harness.noise import MARK, noise
from tests.harness.parcels import failed_item, item

EXAMPLES = examples(150)
LIMITS = ItemLimits.of(Config())


def framed(message: Message) -> bytes:
    body = Codec[Any](Message).encode(message)
    return len(body).to_bytes(4, "big") + body


SPEC = TensorSpec(name=MARK.decode(), dtype="uint8", shape=(3,))
PREPARED = PreparedItem(num_tokens=1, cost=1, grid=(1, 1, 1), tensors=(SPEC,), tensor_bytes=(3,))
BEAT = Beat(last_order=1, busy_s=0.5, preloaded=True)
FRAMES = [
    framed(PREPARED) + b"abc",
    framed(PreparerReady()),
    framed(PrepareFailed(code="INTERNAL", message=MARK.decode())),  # type: ignore[arg-type]
    framed(BEAT),
]


def quiet(error: Exception) -> None:
    assert MARK.decode() not in str(error)
    assert len(str(error)) < 1000


def over_a_pair(data: bytes, read: Callable[[socket.socket], Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    assert isinstance(read(ours), Message)
                except WireError as error:
                    quiet(error)
                    return


@EXAMPLES
@given(noise(FRAMES))
def test_a_preparers_frames(data: bytes) -> None:
    over_a_pair(data, lambda sock: FrameSocket[Any](sock, FromPreparer).receive())


@EXAMPLES
@given(noise(FRAMES))
def test_a_childs_first_frame(data: bytes) -> None:
    over_a_pair(data, lambda sock: Pipe(sock).receive_blocking(FromWorker))


@EXAMPLES
@given(noise(FRAMES), st.integers(0, 50))
def test_a_stream_in_pieces(data: bytes, cut: int) -> None:
    async def read() -> None:
        ours, theirs = socket.socketpair()
        stream = await over_socket(ours, FromWorker)
        theirs.sendall(data[:cut])
        receiving = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        theirs.sendall(data[cut:])
        theirs.close()
        try:
            while (message := await asyncio.wait_for(receiving, 5)) is not None:
                assert isinstance(message, Message)
                receiving = asyncio.create_task(stream.receive())
        except WireError as error:
            quiet(error)
        stream.close()

    asyncio.run(read())


GOOD = item_frames(item())
HEADERS = [bytes(GOOD[0]), bytes(item_frames(failed_item())[0])]


@EXAMPLES
@given(noise(HEADERS), st.one_of(st.none(), st.just(bytes(GOOD[1])), st.binary(max_size=100)), st.booleans())
def test_what_a_receiver_is_pushed(header: bytes, rows: bytes | None, more: bool) -> None:
    frames = [header, *([] if rows is None else [rows]), *([b"more"] if more else [])]
    try:
        received = read_frames(frames, "numpy")
    except BadFrameError as error:
        quiet(error)
    else:
        assert (received.array is None) == (received.header.error is not None)


JSON = [
    b'{"req_id": "%s", "receive_count": 2, "receive_url": "127.0.0.1:9"}' % MARK,
    b'{"req_id": "%s", "num_parts": 1, "part_idx": 0, "modality": "IMAGE", "mm_items": ["aGVsbG8=", {"url": "x"}]}'
    % MARK,
    b'{"req_id": "r", "num_parts": 1, "part_idx": 0, "modality": "%s", "mm_items": [[[]]], "embedding_port": [1]}'
    % MARK,
    b'{"req_id": "%s", "prefill_host": "[::1]", "embedding_port": 9, "session_id": "h:9", "buffer_address": 8}' % MARK,
]


@pytest.mark.parametrize("backend", ["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"])
@EXAMPLES
@given(body=noise(JSON))
def test_sglangs_bodies(backend: str, body: bytes) -> None:
    push = push_backend(backend)
    for read in (
        lambda fields: read_registration(fields, push),
        lambda fields: read_fetch(fields, push),
        lambda fields: read_encode(fields, push, max_items=8, limits=LIMITS),
    ):
        try:
            read(read_fields(body))
        except RefusalError as error:
            quiet(error)


@EXAMPLES
@given(
    noise(
        [
            pb.EncodeRequest(items=[pb.Item(data=MARK), pb.Item(url=MARK.decode())], output=1).SerializeToString(),
            pb.EncodeRequest(items=[pb.Item(data=b"x", modality=1)] * 3, request_id="r").SerializeToString(),
        ]
    )
)
def test_grpc_messages(data: bytes) -> None:
    try:
        request = read_request(data, LIMITS, 8)
    except EncoderError as error:
        quiet(error)
    else:
        assert all(isinstance(entry, EncoderError) or entry.modality in Modality for entry in request.items)
