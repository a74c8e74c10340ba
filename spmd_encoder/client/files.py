"""Files of this machine: read where they are regular ones, written as a whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Opening a pipe would wait for its writer. The first is unknown to Windows, the second to all others.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class WriteError(Exception):
    """A file cannot be written; one sentence with its path and the reason."""


def read_regular(path: str) -> bytes:
    """Raises OSError, or ValueError for a pipe, a device, a folder, or a path that no file can have."""
    descriptor = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write `path`'s bytes to: under another name first, synced, then renamed. Raises `WriteError`."""
    part = path.with_name(f".{path.name}.part")
    with named(path):
        try:
            with part.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An OSError within, which often says only why, as a `WriteError` that says where, too."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None
