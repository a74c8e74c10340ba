"""Messages with raw frames after them over a blocking socket, and a preparer at its other end."""

from __future__ import annotations

import io
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.config import Config
from spmd_encoder.errors import ErrorCode
from spmd_encoder.media.line import Prepared
from spmd_encoder.models.loading import load_preprocessor
from spmd_encoder.runtime.features import features_of, tensor_bytes
from spmd_encoder.runtime.preparer import Preparer
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.preparing import FromPreparer, Prepare, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.streams import MAX_FRAME_BYTES, FrameSocket
from spmd_encoder.worker.faults import Faults
from tests.harness.world import noise_png


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def request(media: bytes) -> Prepare:
    return Prepare(digest="sha256:0", modality=Modality.IMAGE, media_bytes=len(media))


def test_large_frames_come_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    frames = [os.urandom(2_000_000), b"", b"x"]
    wire: FrameSocket[Prepare] = FrameSocket(pair[1], Prepare)
    sender = threading.Thread(target=FrameSocket[Prepare](pair[0], Prepare).send, args=(request(b"ab"), frames))
    sender.start()
    assert wire.receive() == request(b"ab")
    assert [bytes(wire.receive_frame(len(frame))) for frame in frames] == frames
    sender.join()


def test_a_frame_that_is_taken_in_several_steps_comes_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    frame = bytes(range(250)) * 600_000
    sender = threading.Thread(target=pair[0].sendall, args=(frame,))
    sender.start()
    assert FrameSocket[Prepare](pair[1], Prepare).receive_frame(len(frame)) == frame
    sender.join()


def test_a_peer_that_goes_is_a_connection_error(pair: tuple[socket.socket, socket.socket]) -> None:
    wire: FrameSocket[Prepare] = FrameSocket(pair[0], Prepare)
    pair[1].sendall(struct.pack(">I", 100) + b"half")
    pair[1].close()
    with pytest.raises(ConnectionError):
        wire.receive()
    with pytest.raises(ConnectionError):
        wire.send(request(b""), [bytes(10_000_000)])


@pytest.mark.parametrize("data", [struct.pack(">I", MAX_FRAME_BYTES + 1), struct.pack(">I", 1) + b"\xc1"])
def test_noise_is_a_wire_error(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    pair[1].sendall(data)
    with pytest.raises(WireError):
        FrameSocket[Prepare](pair[0], Prepare).receive()


def test_a_tensor_comes_back_as_it_went() -> None:
    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.arange(6).reshape(2, 3).t(),
        "c": torch.tensor([[True, False]]),
    }
    for tensor in tensors.values():
        back = torch.frombuffer(bytearray(tensor_bytes(tensor)), dtype=tensor.dtype).reshape(tensor.shape)
        assert torch.equal(back, tensor)


def answer(pair: tuple[socket.socket, socket.socket], folder: Path, media: bytes) -> Prepared | PrepareFailed:
    preparer = Preparer(load_preprocessor(folder), Faults({}), Config())
    ours: FrameSocket[FromPreparer] = FrameSocket(pair[0], FromPreparer)
    worker = threading.Thread(target=preparer.answer, args=(FrameSocket[Prepare](pair[1], Prepare),))
    worker.start()
    ours.send(request(media), [media])
    reply = ours.receive()
    prepared = reply
    if isinstance(reply, PreparedItem):
        prepared = Prepared(reply, [ours.receive_frame(size) for size in reply.tensor_bytes])
    worker.join()
    assert isinstance(prepared, Prepared | PrepareFailed)
    return prepared


def test_a_preparer_gives_the_familys_features(pair: tuple[socket.socket, socket.socket], qwen_tiny: Path) -> None:
    media = noise_png(1, 84, 70)
    prepared = answer(pair, qwen_tiny, media)
    assert isinstance(prepared, Prepared)
    features = features_of(prepared)
    want = load_preprocessor(qwen_tiny).preprocess(Image.open(io.BytesIO(media)).convert("RGB"))
    assert (features.num_tokens, features.cost, features.grid) == (want.num_tokens, want.cost, want.grid)
    assert features.tensors.keys() == want.tensors.keys()
    assert all(torch.equal(features.tensors[name], tensor) for name, tensor in want.tensors.items())


@pytest.mark.parametrize(
    ("media", "code"),
    [
        (noise_png(1, 8, 8)[:60], ErrorCode.MEDIA_CORRUPT),
        (b"GIF89a", ErrorCode.MEDIA_CORRUPT),
        (b"%PDF-1.7", ErrorCode.MEDIA_UNSUPPORTED),
        (noise_png(1, 3000, 2), ErrorCode.MEDIA_CORRUPT),
    ],
    ids=["cut", "headless", "pdf", "strip"],
)
def test_a_preparer_says_what_is_wrong(
    pair: tuple[socket.socket, socket.socket], qwen_tiny: Path, media: bytes, code: ErrorCode
) -> None:
    failed = answer(pair, qwen_tiny, media)
    assert isinstance(failed, PrepareFailed)
    assert failed.code is code
    assert failed.message.isprintable()


def test_what_does_not_block_finds_a_peer_that_does_not_read() -> None:
    """As a preparer that answers without reading: each question stays in the socket, until there is no room."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire: FrameSocket[PreparerReady] = FrameSocket(ours, PreparerReady)
        wire.send_now(PreparerReady())
        assert FrameSocket[PreparerReady](theirs, PreparerReady).receive() == PreparerReady()
        with pytest.raises(ConnectionError):
            for _ in range(10**6):
                wire.send_now(PreparerReady())
