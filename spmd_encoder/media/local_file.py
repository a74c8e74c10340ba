"""Files of the server named as `file:///absolute/path`, from inside one folder only.

A caller must learn nothing of files outside that folder, not even whether they exist, and must not get at one by any
spelling, by a symbolic link, or by swapping a folder for a link between check and use.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.daemon_threads import DaemonThreads

_CHUNK = 2**20
_PREFIX = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORBIDDEN = "the file is not inside the folder that --allowed-local-media-path names"
# A folder needs no read permission to be passed through, where the system knows such a way.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking: a FIFO that took the file's place must not hang the open.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def parse_file_url(url: str) -> str:
    """The absolute path that a file URL names. Raises `EncoderError` INVALID_REQUEST or FETCH_FORBIDDEN."""
    match = _PREFIX.match(url)
    if match is None:
        raise _invalid("write file:///absolute/path, without a host")
    escaped = url[match.end() :]
    if not escaped.isprintable() or "?" in escaped or "#" in escaped or _BAD_ESCAPE.search(escaped):
        raise _invalid("escape control characters, ?, # and % with %")
    raw = unquote_to_bytes(escaped)
    if b"\0" in raw:
        raise _invalid("it holds a NUL byte")
    if {b".", b".."} & set(raw.split(b"/")):
        raise EncoderError(ErrorCode.FETCH_FORBIDDEN, "the file's path must not hold . or .. as a part")
    return os.fsdecode(raw)


async def read_local_file(
    root: str, path: str, *, max_bytes: int | None, reserve: Callable[[int], None], threads: DaemonThreads
) -> bytes:
    """The file's bytes, read in a thread; `reserve` is told its size before.

    Raises `EncoderError`: FETCH_FORBIDDEN outside of `root` (after all symbolic links) and for what is no regular
    file, FETCH_FAILED, TOO_LARGE.
    """
    size = await threads.run(partial(_size, root, path))
    if max_bytes is not None and size > max_bytes:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the file has {size} bytes, more than {max_bytes // 2**20} MiB (--media-url-max-file-size-mb)",
        )
    if size == 0:
        raise _failed("it is empty")
    reserve(size)
    stop = Event()
    try:
        return await threads.run(partial(_read, root, path, size, stop))
    finally:
        stop.set()


def _size(root: str, path: str) -> int:
    with _open(root, path) as file:
        return os.fstat(file.fileno()).st_size


def _read(root: str, path: str, size: int, stop: Event) -> bytes:
    """All of the file, which must have `size` bytes still; nothing once `stop` is set."""
    chunks: list[bytes] = []
    left = size
    with _open(root, path) as file:
        # One byte more than there should be, so as to see growth.
        while not stop.is_set() and (chunk := file.read(min(_CHUNK, left + 1))):
            left -= len(chunk)
            if left < 0:
                break
            chunks.append(chunk)
    if left != 0:
        raise _failed("it changed while it was read")
    return b"".join(chunks)


def _open(root: str, path: str) -> BinaryIO:
    try:
        return _open_inside(root, path)
    except (FileNotFoundError, NotADirectoryError):
        raise _failed("there is no such file") from None
    except PermissionError:
        raise _failed("the server has no permission to read it") from None
    except OSError:
        raise _failed("the system cannot open it") from None


def _open_inside(root: str, path: str) -> BinaryIO:
    """Walk from `root` to the file without following any link: the path is real already, or changes meanwhile."""
    real_root, real = os.path.realpath(root), os.path.realpath(path)
    if not Path(real).is_relative_to(real_root):
        raise EncoderError(ErrorCode.FETCH_FORBIDDEN, _FORBIDDEN)
    *folders, name = Path(real).relative_to(real_root).parts or (".",)
    at = os.open(real_root, _PASS)
    try:
        for folder in folders:
            inner = os.open(folder, _PASS, dir_fd=at)
            os.close(at)
            at = inner
        # Before opening: to open a device may have effects.
        _check_regular(os.stat(name, dir_fd=at, follow_symlinks=False))
        file = os.fdopen(os.open(name, _READ, dir_fd=at), "rb", buffering=0)
    finally:
        os.close(at)
    try:
        _check_regular(os.fstat(file.fileno()))
    except EncoderError:
        file.close()
        raise
    return file


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise EncoderError(ErrorCode.FETCH_FORBIDDEN, "only regular files are read, no folders, pipes or devices")


def _invalid(why: str) -> EncoderError:
    return EncoderError(ErrorCode.INVALID_REQUEST, f"the file URL cannot be used: {why}")


def _failed(why: str) -> EncoderError:
    return EncoderError(ErrorCode.FETCH_FAILED, f"the file could not be fetched: {why}")
