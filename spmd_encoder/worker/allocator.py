"""What the C library does with memory that is freed.

As a default glibc gives large pieces back to the system at once, which hands them out again page by page, cleared: a
page fault per 4 KiB. That took half of a small picture's preparation, and a tenth of a SigLIP tower's forward on a CPU.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 512 * 2**20
_LARGE_BYTES = 32 * 2**20  # the most that it takes
# Of malloc.h, see mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory(num_bytes: int = KEPT_BYTES) -> None:
    """Have this process keep so much of what is freed, for all of its threads: to be called before these begin.

    Nothing with another C library than glibc.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, num_bytes)
        libc.mallopt(_M_ARENA_MAX, 1)  # others than the first give back at 64 MiB, whatever is said here


def give_back_freed_memory() -> None:
    """What was kept. For when there is nothing to do: it may take a tenth of a second, in which other threads that
    want memory wait."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
