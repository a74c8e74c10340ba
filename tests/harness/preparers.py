"""Processes in the place of preparers, whose deeds hang on the media; a pool of them, and questions to it."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from spmd_encoder.api.types import NO_OPTIONS, ItemOptions, Modality
from spmd_encoder.errors import EncoderError
from spmd_encoder.media.cpu_time import cpu_seconds
from spmd_encoder.media.line import Prepared
from spmd_encoder.media.pool import PreparerPool
from spmd_encoder.wire.preparing import Prepare

# What it does hangs on the media: dies, hangs, refuses, or sends it back reversed.
SCRIPT = """
import os, signal, socket, sys, time
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import TensorSpec
from spmd_encoder.wire.preparing import Prepare, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.shared_memory import SharedMemory
from spmd_encoder.wire.streams import FrameSocket, send_with_descriptor

sock = socket.socket(fileno=int(sys.argv[1]))
wire, shared = FrameSocket(sock, Prepare), SharedMemory.create() if sys.argv[3] == "shared" else None
if sys.argv[3] == "loose":  # which the leader does not take
    descriptor = os.memfd_create("loose")
    os.ftruncate(descriptor, 2**20)
    shared = SharedMemory(descriptor, 2**20)
time.sleep(float(sys.argv[2]))
send_with_descriptor(sock, PreparerReady(), None if shared is None else shared.descriptor)
while True:
    try:
        asked = wire.receive()
        size = asked.media_bytes
        media = bytes(shared.take([size])[0] if asked.is_shared else wire.receive_frame(size))
    except ConnectionError:
        break
    if media == b"die" or (media == b"film" and asked.options.fps == 30):
        os.kill(os.getpid(), signal.SIGKILL)
    if media == b"hang":
        time.sleep(3600)
    if media == b"slow":
        time.sleep(0.3)
    if media == b"bad":
        wire.send(PrepareFailed(code=ErrorCode.MEDIA_CORRUPT, message="no picture"))
        continue
    spec = TensorSpec(name="x", dtype="uint8", shape=(len(media),))
    put = shared is not None and asked.may_share and shared.put([media[::-1]])
    item = PreparedItem(
        num_tokens=size, cost=1, grid=None, tensors=(spec,), tensor_bytes=(size,), is_shared=put
    )
    wire.send(item, [] if put else [media[::-1]])
    if media == b"chat":
        wire.send(PrepareFailed(code=ErrorCode.MEDIA_CORRUPT, message="unasked"))
"""


class Child:
    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self.pid = process.pid
        self.sock = sock
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def start(load_s: float = 0.0, memory: str = "shared") -> Child:
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, str(theirs.fileno()), str(load_s), memory, pass_fds=(theirs.fileno(),)
    )
    theirs.close()
    return Child(process, ours)


@asynccontextmanager
async def pool_of(
    size: int,
    *,
    timeout_s: float = 60.0,
    start_timeout_s: float = 60.0,
    starter: Callable[[], Awaitable[Child]] = start,
    cpu_seconds: Callable[[int], float | None] = cpu_seconds,
) -> AsyncIterator[PreparerPool]:
    pool = PreparerPool(starter, size, timeout_s=timeout_s, start_timeout_s=start_timeout_s, cpu_seconds=cpu_seconds)
    try:
        yield pool
    finally:
        await pool.close()
        await pool.close()


async def ask(
    pool: PreparerPool, media: bytes, modality: Modality = Modality.IMAGE, options: ItemOptions = NO_OPTIONS
) -> bytes:
    digest = f"sha256:{hashlib.sha256(media).hexdigest()}"
    request = Prepare(digest=digest, modality=modality, media_bytes=len(media), options=options)
    prepared: Prepared = await pool.run(request, media)
    assert prepared.item.num_tokens == len(media)
    return bytes(prepared.buffers[0])


async def error_of(
    pool: PreparerPool, media: bytes, modality: Modality = Modality.IMAGE, options: ItemOptions = NO_OPTIONS
) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        await ask(pool, media, modality, options)
    return caught.value


async def settled(pool: PreparerPool, size: int) -> tuple[int, ...]:
    while len(pool.pids) < size:
        await asyncio.sleep(0.01)
    return pool.pids
