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
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import msgspec

from spmd_encoder.errors import EncoderError
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.preparing import FromPreparer, Prepare, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.shared_memory import SharedMemory
from spmd_encoder.wire.streams import FrameSocket, receive_with_descriptor

MAX_PREPARED_BYTES = 8 * 2**30
"""Of one item's tensors: several times what the largest pictures have."""
_ON_LOOP_BYTES = 2 * 2**20
"""What is copied on the loop, which takes some tenths of a millisecond."""
_VALUE_BYTES = MappingProxyType(
    {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
)


@dataclass(frozen=True)
class Prepared:
    """What came back: `buffers` hold the tensors of `item.tensors`, in order, little-endian and C-order."""

    item: PreparedItem
    buffers: list[bytearray]


class PreparerLine:
    """`sock` is our end of a socket pair, and blocks; `threads` has one for each line.

    `told` is called on the loop, once for each question: with what the process made of the item, or with why it made
    nothing. ConnectionError ends the line: the process has gone, or has said what is no answer. A picture may have
    taken it over, and where the next answer begins is not known then. It may also come without a question.
    """

    def __init__(
        self, sock: socket.socket, threads: ThreadPoolExecutor, told: Callable[[Prepared | Exception], None]
    ) -> None:
        self._sock = sock
        self._threads = threads
        self._told = told
        self._loop = asyncio.get_running_loop()
        # By its number: asyncio makes a text of what it does not know yet, which asks a socket for its addresses.
        self._descriptor = sock.fileno()
        self._wire: FrameSocket[FromPreparer] = FrameSocket(sock, FromPreparer)
        self._shared: SharedMemory | None = None
        self._is_asked = False
        self._moving: asyncio.Task[None] | None = None

    async def wait_ready(self) -> None:
        """Until the process has loaded. Raises ConnectionError when it has gone."""
        _, descriptor = await self._loop.run_in_executor(
            self._threads, receive_with_descriptor, self._sock, PreparerReady
        )
        if descriptor is not None:
            with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or no memory
                self._shared = SharedMemory.of_peer(descriptor)

    def listen(self) -> None:
        """Once it has loaded: from now on it can be asked."""
        self._loop.add_reader(self._descriptor, self._read)

    def has_news(self) -> bool:
        """Whether something is here to be read: an answer, or that the process has gone."""
        return self._wire.wait(0)

    def ask(self, request: Prepare, media: bytes | memoryview) -> None:
        """Does not block. The next question may be put when `told` has been called for this one."""
        self._is_asked = True
        shared = self._shared
        is_shared = shared is not None and len(media) <= _ON_LOOP_BYTES and shared.put([media])
        request = msgspec.structs.replace(request, may_share=shared is not None, is_shared=is_shared)
        if not is_shared:
            self._in_thread(lambda: self._wire.send(request, [media]))
            return
        try:
            self._wire.send_now(request)
        except ConnectionError as error:
            self._tell(error)

    def close(self) -> None:
        """Nothing is told any more. The socket is its owner's."""
        self._loop.remove_reader(self._descriptor)
        if self._moving is not None:
            self._moving.cancel()
        if self._shared is not None:
            self._shared.close()

    def _read(self) -> None:
        outcome: Prepared | Exception
        try:
            reply = self._wire.receive_whole()
            if not self._is_asked:
                raise WireError("it spoke unasked")
            if reply is None or not _is_small(reply):
                self._in_thread(partial(self._prepared, reply))
                return
            outcome = self._prepared(reply)
        except Exception as error:
            outcome = error
        self._tell(outcome)

    def _prepared(self, reply: FromPreparer | None) -> Prepared:
        """What `reply` and the frames after it say; None: it is not read yet. Raises what the process says of the
        item."""
        if reply is None:
            reply = self._wire.receive()
        if isinstance(reply, PrepareFailed):
            raise EncoderError(reply.code, reply.message)
        if isinstance(reply, PreparerReady):
            raise WireError("it is ready, twice")
        _check_sizes(reply)
        if not reply.is_shared:
            return Prepared(reply, [self._wire.receive_frame(num_bytes) for num_bytes in reply.tensor_bytes])
        if self._shared is None:
            raise WireError("there is no memory that both see")
        return Prepared(reply, self._shared.take(reply.tensor_bytes))

    def _tell(self, outcome: Prepared | Exception) -> None:
        self._is_asked = False
        if isinstance(outcome, ValueError):  # of the wire, or of the memory
            outcome = ConnectionError(f"it said what is no answer: {outcome}")
        if isinstance(outcome, ConnectionError):
            self._loop.remove_reader(self._descriptor)
        self._told(outcome)

    def _in_thread(self, call: Callable[[], Prepared | None]) -> None:
        """Nothing else is read meanwhile. What it raises, or returns unless it is None, is told."""
        self._loop.remove_reader(self._descriptor)
        self._moving = self._loop.create_task(self._moved(call))

    async def _moved(self, call: Callable[[], Prepared | None]) -> None:
        outcome: Prepared | Exception | None
        try:
            outcome = await self._loop.run_in_executor(self._threads, call)
        except Exception as error:
            outcome = error
        self._loop.add_reader(self._descriptor, self._read)
        if outcome is not None:
            self._tell(outcome)


def _is_small(reply: FromPreparer) -> bool:
    """Whether all that belongs to it can be had at once."""
    return not isinstance(reply, PreparedItem) or (reply.is_shared and sum(reply.tensor_bytes) <= _ON_LOOP_BYTES)


def _check_sizes(item: PreparedItem) -> None:
    """Raises WireError where a tensor's bytes are not what its shape says, or all of them are too many."""
    if len(item.tensors) != len(item.tensor_bytes):
        raise WireError(f"{len(item.tensor_bytes)} sizes for {len(item.tensors)} tensors")
    for spec, num_bytes in zip(item.tensors, item.tensor_bytes, strict=True):
        if min(spec.shape, default=0) < 0 or math.prod(spec.shape) * _VALUE_BYTES.get(spec.dtype, 0) != num_bytes:
            raise WireError("a tensor whose bytes are not what its shape has")
    if (total := sum(item.tensor_bytes)) > MAX_PREPARED_BYTES:
        raise WireError(f"{total} bytes of tensors, over the limit of {MAX_PREPARED_BYTES}")
