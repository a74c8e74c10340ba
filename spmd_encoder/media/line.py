"""A leader's line to one preparer: a question and its answer, one after the other.

Small ones cost the loop some microseconds: the message is read when it is there, its bytes lie in memory that both
see. Large ones are moved by a thread: what has no room there through the socket, in system calls that hold no GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import ParamSpec, TypeVar

import msgspec

from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.preparing import FromPreparer, Prepare, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.shared_memory import SharedMemory
from spmd_encoder.wire.streams import FrameSocket, receive_with_descriptor

P = ParamSpec("P")
T = TypeVar("T")
Answer = tuple[PreparedItem | PrepareFailed, list[bytearray]]

MAX_PREPARED_BYTES = 8 * 2**30
"""Of one item's tensors: several times what the largest pictures have."""
_ON_LOOP_BYTES = 2 * 2**20
"""What is copied on the loop, which takes some tenths of a millisecond."""
_VALUE_BYTES = MappingProxyType(
    {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
)


class PreparerLine:
    """`sock` is our end of a socket pair, and blocks; `threads` has one for each line."""

    def __init__(self, sock: socket.socket, threads: ThreadPoolExecutor) -> None:
        self._sock = sock
        self._wire: FrameSocket[FromPreparer] = FrameSocket(sock, FromPreparer)
        self._shared: SharedMemory | None = None
        self._threads = threads

    async def wait_ready(self) -> None:
        """Until the process has loaded. Raises ConnectionError when it has gone."""
        _, descriptor = await self._in_thread(receive_with_descriptor, self._sock, PreparerReady)
        if descriptor is not None:
            with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or no memory
                self._shared = SharedMemory.of_peer(descriptor)

    def has_news(self) -> bool:
        """Whether something is here to be read: an answer, or that the process has gone."""
        return self._wire.wait(0)

    async def ask(self, request: Prepare, media: bytes | memoryview) -> Answer:
        """Raises ConnectionError when the process has gone, or says what is no answer: a picture may have taken it
        over, and where the next answer begins is not known then."""
        try:
            request = msgspec.structs.replace(request, may_share=self._shared is not None)
            if len(media) <= _ON_LOOP_BYTES and self._shared is not None and self._shared.put([media]):
                self._wire.send_now(msgspec.structs.replace(request, is_shared=True))
            else:
                await self._in_thread(self._wire.send, request, [media])
            await self._readable()
            reply = self._wire.receive_whole()
            if reply is None:
                return await self._in_thread(self._receive)
            sizes = _sizes(reply)
            if sum(sizes) > _ON_LOOP_BYTES or not _is_shared(reply):
                return await self._in_thread(self._with_frames, reply, sizes)
            return self._with_frames(reply, sizes)
        except (WireError, ValueError) as error:
            raise ConnectionError(f"it said what is no answer: {error}") from None

    def close(self) -> None:
        """When no question is under way any more. The socket is its owner's."""
        if self._shared is not None:
            self._shared.close()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        there: asyncio.Future[None] = loop.create_future()
        # By its number: asyncio makes a text of what it does not know yet, which asks a socket for its addresses.
        descriptor = self._sock.fileno()
        loop.add_reader(descriptor, _set, there)
        try:
            await there
        finally:
            loop.remove_reader(descriptor)

    def _receive(self) -> Answer:
        reply = self._wire.receive()
        return self._with_frames(reply, _sizes(reply))

    def _with_frames(self, reply: FromPreparer, sizes: list[int]) -> Answer:
        if isinstance(reply, PreparerReady):
            raise WireError("it is ready, twice")
        if not _is_shared(reply):
            return reply, [self._wire.receive_frame(num_bytes) for num_bytes in sizes]
        if self._shared is None:
            raise WireError("there is no memory that both see")
        return reply, self._shared.take(sizes)

    def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
        future.add_done_callback(_seen)  # also where nobody waits for it any more
        return future


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _seen(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()


def _is_shared(reply: FromPreparer) -> bool:
    return isinstance(reply, PreparedItem) and reply.is_shared


def _sizes(reply: FromPreparer) -> list[int]:
    """Bytes of each tensor. Raises WireError where they are not what the shapes say, or too many."""
    if not isinstance(reply, PreparedItem):
        return []
    sizes = [math.prod(spec.shape) * _VALUE_BYTES.get(spec.dtype, 0) for spec in reply.tensors]
    if min((0, *(side for spec in reply.tensors for side in spec.shape))) < 0 or sizes != list(reply.tensor_bytes):
        raise WireError("tensors whose bytes are not what their shapes have")
    if sum(sizes) > MAX_PREPARED_BYTES:
        raise WireError(f"{sum(sizes)} bytes of tensors, over the limit of {MAX_PREPARED_BYTES}")
    return sizes
