"""Asks the kernel for a tower's bytes before they are needed: mapped weights are read only when they are touched."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

THREADS = 4
CHUNK_BYTES = 8 * 2**20
_LOOK_BYTES = 2**20
_LENGTH_BYTES = 8


def prefetch(shards: Mapping[Path, Collection[str]]) -> list[threading.Thread]:
    """Have the named tensors of these safetensors files read into the page cache, by a few threads that end by
    themselves. Returns at once.

    It takes none of this process's memory, and next to no time where the files are cached already. Without it a cold
    file is read by page faults, one after another. A file that cannot be read is left to who needs it.
    """
    if not hasattr(os, "posix_fadvise"):  # no Linux
        return []
    chunks: queue.SimpleQueue[tuple[Path, int, int]] = queue.SimpleQueue()
    for path, names in shards.items():
        for begin, end in spans(path, names):
            for start in range(begin, end, CHUNK_BYTES):
                chunks.put((path, start, min(start + CHUNK_BYTES, end)))
    threads = [threading.Thread(target=_ask, args=(chunks,), name="prefetch", daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def spans(path: Path, names: Collection[str]) -> list[tuple[int, int]]:
    """Half-open ranges of the file's bytes that hold the named tensors, ascending; neighbours are one. Empty where the
    file is no safetensors file: https://github.com/huggingface/safetensors#format."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
        offsets = [header[name]["data_offsets"] for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    base = _LENGTH_BYTES + length
    return list(_joined(sorted((base + begin, base + end) for begin, end in offsets)))


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    low = high = 0
    for begin, end in ranges:
        if begin != high:
            if high > low:
                yield low, high
            low = begin
        high = end
    if high > low:
        yield low, high


def _ask(chunks: queue.SimpleQueue[tuple[Path, int, int]]) -> None:
    """The call waits while the device's queue is full, so it is made by several threads."""
    while True:
        try:
            path, begin, end = chunks.get_nowait()
        except queue.Empty:
            return
        try:
            with path.open("rb") as file:
                if not is_cached(file.fileno(), begin, end):
                    os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
        except OSError:
            return


def is_cached(file: int, begin: int, end: int) -> bool:
    """Whether the range is in the page cache, by a look at a byte of every MiB: to ask for it again would have the
    kernel find each of its pages. False where the file system cannot tell."""
    byte = bytearray(1)
    try:
        return all(os.preadv(file, [byte], at, os.RWF_NOWAIT) for at in range(begin, end, _LOOK_BYTES))
    except OSError:  # it is not, or there is no telling
        return False
