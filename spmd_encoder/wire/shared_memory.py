"""Memory that two processes see, for bytes that would cost more in a socket: a copy less, and no wait for its buffer.

It belongs to a line on which questions and answers alternate: whoever's turn it is writes, and the other reads only
after the message that says so. So there is nothing to lock, and nothing to give back.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence

SHARED_BYTES = 8 * 2**20
"""What the tensors of a picture of some 600 x 600 pixels take. Only what was used once takes memory."""
_ALIGNED = 64


class SharedMemory:
    """`descriptor` goes to the other process, for `of_peer` there."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size)
        self._view = memoryview(self._memory)

    @classmethod
    def create(cls, size: int = SHARED_BYTES) -> SharedMemory | None:
        """None where the system has none of this kind (no Linux)."""
        try:
            descriptor = os.memfd_create("spmd_encoder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            return None

    @classmethod
    def of_peer(cls, descriptor: int) -> SharedMemory:
        """Takes over the descriptor. Raises OSError where it is no such memory: one that its peer could shrink would
        end whoever reads it."""
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the memory may shrink")
            return cls(descriptor, os.fstat(descriptor).st_size)
        except BaseException:
            os.close(descriptor)
            raise

    def put(self, buffers: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Write them one after another. False, and nothing is written, where there is no room."""
        starts = _starts([memoryview(buffer).nbytes for buffer in buffers])
        if starts[-1] > len(self._view):
            return False
        for start, buffer in zip(starts, buffers, strict=False):
            data = memoryview(buffer)
            if data.nbytes:
                self._view[start : start + data.nbytes] = data.cast("B")
        return True

    def take(self, sizes: Sequence[int]) -> list[bytearray]:
        """A copy of each of what `put` has written. Raises ValueError where so much cannot be here."""
        starts = _starts(sizes)
        if starts[-1] > len(self._view):
            raise ValueError(f"{sum(sizes)} bytes, of a memory of {len(self._view)}")
        return [bytearray(self._view[start : start + size]) for start, size in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        """May be called again."""
        if self.descriptor >= 0:
            self._view.release()
            with contextlib.suppress(BufferError):  # a thread is copying out of it, and is its last owner then
                self._memory.close()
            os.close(self.descriptor)
            self.descriptor = -1


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each begins, and where the next would."""
    starts = [0]
    for size in sizes:
        starts.append((starts[-1] + size + _ALIGNED - 1) // _ALIGNED * _ALIGNED)
    return starts
