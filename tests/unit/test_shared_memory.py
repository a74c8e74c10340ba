"""Memory that two processes see: what is put is taken, nothing goes beyond it, and no peer can shrink it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.wire.shared_memory import SharedMemory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has such memory")


def made(size: int) -> SharedMemory:
    shared = SharedMemory.create(size)
    assert shared is not None
    return shared


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_what_is_put_is_taken_and_starts_at_an_aligned_place(buffers: list[bytes]) -> None:
    shared = made(4096)
    peer = SharedMemory.of_peer(os.dup(shared.descriptor))
    try:
        assert shared.put(buffers)
        assert [bytes(taken) for taken in peer.take([len(buffer) for buffer in buffers])] == buffers
    finally:
        shared.close()
        peer.close()


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_what_has_no_room_is_neither_put_nor_taken(first: int, second: int) -> None:
    shared = made(8192)
    fits = -(-first // 64) * 64 + -(-second // 64) * 64 <= 8192
    try:
        assert shared.put([bytes(first), memoryview(bytearray(second))]) is fits
        if not fits:
            with pytest.raises(ValueError, match="bytes"):
                shared.take([first, second])
    finally:
        shared.close()


def test_another_process_sees_it() -> None:
    shared = made(4096)
    script = (
        "import sys; from spmd_encoder.wire.shared_memory import SharedMemory;"
        "s = SharedMemory.of_peer(int(sys.argv[1])); s.put([s.take([5])[0][::-1]])"
    )
    shared.put([b"hello"])
    subprocess.run(
        [sys.executable, "-c", script, str(shared.descriptor)], pass_fds=[shared.descriptor], check=True, timeout=60
    )
    assert shared.take([5]) == [b"olleh"]
    shared.close()
    shared.close()


def test_memory_that_may_shrink_or_has_shrunk_is_not_taken_over() -> None:
    descriptor = os.memfd_create("loose")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(OSError, match="shrink"):
        SharedMemory.of_peer(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    shared = made(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.descriptor, 0)
    shared.close()
