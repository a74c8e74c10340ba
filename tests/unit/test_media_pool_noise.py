"""A preparer that a picture has taken over: whatever it says, it costs itself and that picture, and little memory."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import threading
from collections.abc import Callable

import psutil
import pytest

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.line import MAX_PREPARED_BYTES, Prepared
from spmd_encoder.media.pool import PreparerPool
from spmd_encoder.wire.codec import Codec
from spmd_encoder.wire.messages import Message, TensorSpec
from spmd_encoder.wire.preparing import FromPreparer, Prepare, PreparedItem, PreparerReady
from spmd_encoder.wire.shared_memory import SHARED_BYTES, SharedMemory
from spmd_encoder.wire.streams import MAX_FRAME_BYTES, FrameSocket, send_with_descriptor

pytestmark = pytest.mark.timeout(30)


class Child:
    """A thread in the place of a process: only its socket matters here."""

    pid = 0

    def __init__(self, answer: Callable[[bytes], bytes], memory: bool = False) -> None:
        self.sock, theirs = socket.socketpair()
        self._answer = answer
        self._shared = SharedMemory.create() if memory else None
        self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def _serve(self, sock: socket.socket) -> None:
        wire: FrameSocket[Prepare] = FrameSocket(sock, Prepare)
        shared = self._shared
        try:
            send_with_descriptor(sock, PreparerReady(), shared.descriptor if shared else None)
            while True:
                asked = wire.receive()
                size = asked.media_bytes
                media = shared.take([size])[0] if shared and asked.is_shared else wire.receive_frame(size)
                sock.sendall(self._answer(bytes(media)))
        except OSError:
            sock.close()

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return 0

    def kill(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def framed(message: Message) -> bytes:
    body = Codec[FromPreparer](FromPreparer).encode(message)
    return struct.pack(">I", len(body)) + body


def item(*shape: int, dtype: str = "uint8", sizes: tuple[int, ...] | None = None, is_shared: bool = False) -> bytes:
    size = 1
    for side in shape:
        size *= side
    spec = TensorSpec(name="x", dtype=dtype, shape=shape)
    sizes = (size,) if sizes is None else sizes
    return framed(
        PreparedItem(num_tokens=1, cost=1, grid=None, tensors=(spec,), tensor_bytes=sizes, is_shared=is_shared)
    )


NOISE = {
    "no message": struct.pack(">I", 5) + b"\xc1" * 5,
    "a long message": struct.pack(">I", MAX_FRAME_BYTES + 1),
    "another's message": struct.pack(">I", 18) + b"\x81\xa4type\xa7Prepare" + bytes(5),
    "ready again": framed(PreparerReady()),
    "a negative size": item(3, sizes=(-3,)),
    "a negative shape": item(-3, -1, sizes=(3,)),
    "other sizes": item(3, sizes=(4,)),
    "sizes of nothing": item(3, sizes=()),
    "a dtype of no size": item(3, dtype="load"),
    "too much": item(MAX_PREPARED_BYTES + 1),
    "in the memory that is not there, or not so large": item(SHARED_BYTES + 1, is_shared=True),
    "much more in it": item(MAX_PREPARED_BYTES, is_shared=True),
}


@pytest.mark.parametrize("memory", [True, False], ids=["with memory", "without memory"])
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
async def test_noise_costs_the_preparer_and_its_item(noise: bytes, memory: bool) -> None:
    starts = 0

    async def start() -> Child:
        nonlocal starts
        starts += 1
        return Child(lambda media: noise + item(3) + b"abc" if media == b"evil" else item(len(media)) + media, memory)

    pool = PreparerPool(start, 1, timeout_s=10.0)
    try:
        with pytest.raises(EncoderError) as caught:
            await ask(pool, b"evil")
        assert caught.value.code is ErrorCode.MEDIA_CORRUPT
        assert await ask(pool, b"good") == b"good"
        assert starts == 3
    finally:
        await pool.close()


async def test_what_is_promised_takes_no_memory() -> None:
    """And it ends at the time limit."""

    async def start() -> Child:
        return Child(lambda media: item(MAX_PREPARED_BYTES) if media == b"evil" else item(len(media)) + media)

    pool = PreparerPool(start, 1, timeout_s=1.0)
    try:
        before = psutil.Process().memory_info().rss
        asking = asyncio.create_task(ask(pool, b"evil"))
        await asyncio.sleep(0.7)
        assert psutil.Process().memory_info().rss - before < 200 * 2**20
        with pytest.raises(EncoderError, match="--preprocess-timeout-s"):
            await asking
        assert await ask(pool, b"good") == b"good"
    finally:
        await pool.close()


async def ask(pool: PreparerPool, media: bytes) -> bytes:
    digest = f"sha256:{hashlib.sha256(media).hexdigest()}"
    prepared: Prepared = await pool.run(Prepare(digest=digest, modality=Modality.IMAGE, media_bytes=len(media)), media)
    return bytes(prepared.buffers[0])
