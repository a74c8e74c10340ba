"""Embeddings as files, where a language server's file connector finds them: `<folder>/<key>/encoder_cache.safetensors`.

This is the layout that vLLM's example EC connector reads: one tensor `ec_cache`, `[tokens, dim]`. Its reader only asks
whether the path exists, so a file appears whole or not at all: it is written aside, synced, and renamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from spmd_encoder.api.types import Embedding
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.observability.logging import SparseLog
from spmd_encoder.transports.base import ItemParcel, Run
from spmd_encoder.transports.file_index import FileIndex
from spmd_encoder.transports.safetensors import SafetensorsWriter, about

log = logging.getLogger(__name__)

FILE_NAME = "encoder_cache.safetensors"
TENSOR_NAME = "ec_cache"
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
# No key begins with a dot. In the same folder tree, because a rename does not cross file systems.
_ASIDE = ".spmd_encoder"
_STALE_S = 3600.0
_PIECE_BYTES = 16 * 2**20
# Another server may remove the folder, which was empty, between its making and the rename.
_RENAME_TRIES = 8


def is_key(text: str) -> bool:
    """Whether it may name a file: 1 to 128 of `A-Z a-z 0-9 _ . -`, the first of them no dot."""
    return _KEY.fullmatch(text) is not None


class EmbeddingFiles:
    """A `Transport` of single items to keys. What is in `root` counts and may go, whoever wrote it.

    The least recently delivered files go when there are more than `max_bytes`; the order survives a restart. A file
    that holds the same item of the same `model` already is not written again. A parcel without rows is nothing to
    write. Several servers may share a folder, each with its own count.
    """

    def __init__(self, root: Path, *, max_bytes: int, timeout_s: float, model: str, run: Run) -> None:
        self._root = root
        self._aside = root / _ASIDE
        self._timeout_s = timeout_s
        self._model = model
        self._run = run
        self._index = FileIndex(max_bytes)
        self._changed = threading.Condition()
        self._scanned = threading.Event()
        self._jobs: set[asyncio.Future[None]] = set()
        self._closed = False
        self._odd = SparseLog(log)
        # Of its own, since deliveries wait for it in all of the others.
        threading.Thread(target=self._scan, name="embedding-dir", daemon=True).start()

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return self._index.used

    async def deliver(self, parcel: ItemParcel, destination: str) -> None:
        """See `Transport.deliver`. Raises `EncoderError` DELIVERY_FAILED."""
        if not isinstance(parcel.outcome, Embedding):
            return
        if self._closed:
            raise _failed(destination, "the server is ending")
        stop = threading.Event()
        job = asyncio.ensure_future(self._run(partial(self._write, parcel.outcome, destination, stop)))
        self._jobs.add(job)
        try:
            await asyncio.wait({job}, timeout=self._timeout_s)
            if job.cancelled():
                raise _failed(destination, "the server is ending")
            if not job.done():
                raise _failed(destination, f"it took longer than {self._timeout_s:g} s (--send-timeout-s)")
            job.result()
        except OSError as error:
            self._odd.warning("an embedding cannot be written in %s: %s", self._root, error)
            raise _failed(destination, error.strerror or type(error).__name__) from None
        finally:
            stop.set()
            job.cancel()
            self._jobs.discard(job)

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        for job in list(self._jobs):
            job.cancel()

    # -- in threads

    def _write(self, embedding: Embedding, key: str, stop: threading.Event) -> None:
        assert is_key(key)
        parts = self._file(embedding)
        size = sum(map(len, parts))
        if size > self._index.max_bytes:
            raise _failed(key, f"its {size} bytes are more than --embedding-dir-max-bytes {self._index.max_bytes}")
        self._scanned.wait(self._timeout_s)
        with self._busy(key, stop):
            if self._is_there(key, parts[0], size):
                return
            self._reserve(key, size, stop)
            self._place(key, parts, stop)
            with self._changed:
                self._index.commit(key, size)

    def _file(self, embedding: Embedding) -> Sequence[memoryview]:
        """Head and rows. The head says all by which two files are the same."""
        writer = SafetensorsWriter()
        writer.add(TENSOR_NAME, embedding)
        kind = embedding.kind.value
        return writer.finish({"digest": embedding.digest, "model": self._model, "output": kind, **about(embedding)})

    @contextlib.contextmanager
    def _busy(self, key: str, stop: threading.Event) -> Iterator[None]:
        with self._changed:
            self._wait_until(lambda: not self._index.is_busy(key), stop)
            self._index.begin(key)
        try:
            yield
        finally:
            with self._changed:
                self._index.end(key)
                self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool], stop: threading.Event) -> None:
        while not condition():
            _check(stop)
            self._changed.wait(0.5)  # `stop` notifies nobody

    def _is_there(self, key: str, head: memoryview, size: int) -> bool:
        """Whether the file holds this very item; if so, it is the most recently used now."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                is_same = found == size and file.read(len(head)) == head
            if is_same:
                os.utime(path)  # for the order after a restart
        except FileNotFoundError:
            with self._changed:
                self._index.forget(key)
            return False
        with self._changed:
            self._index.add(key, found)
        return is_same

    def _reserve(self, key: str, size: int, stop: threading.Event) -> None:
        with self._changed:
            if key in self._index and self._index.used + size > self._index.max_bytes:
                self._remove(key)  # its new version takes its place
            self._wait_until(lambda: self._reserved(key, size), stop)

    def _reserved(self, key: str, size: int) -> bool:
        while not self._index.reserve(key, size):
            if (oldest := self._index.oldest()) is None:
                return False
            self._remove(oldest)
        return True

    def _place(self, key: str, parts: Sequence[memoryview], stop: threading.Event) -> None:
        self._aside.mkdir(parents=True, exist_ok=True)
        part = self._aside / f"{secrets.token_hex(16)}.part"
        try:
            with part.open("xb") as out:
                for view in parts:
                    for start in range(0, len(view), _PIECE_BYTES):
                        _check(stop)
                        out.write(view[start : start + _PIECE_BYTES])
                out.flush()
                os.fsync(out.fileno())
            _check(stop)
            self._rename(part, self._path(key))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _rename(self, part: Path, path: Path) -> None:
        for attempt in range(_RENAME_TRIES):
            try:
                path.parent.mkdir(exist_ok=True)  # which fails where the folder goes after it was found to be there
                if path.parent.is_symlink():
                    raise NotADirectoryError(None, "the folder of that name is a symbolic link")
                part.replace(path)
                return
            except (FileNotFoundError, FileExistsError):
                if attempt == _RENAME_TRIES - 1:
                    raise

    def _remove(self, key: str) -> None:
        """Out of its place by a rename, so that it is there or not, then for good; who reads it still, may go on."""
        self._index.forget(key)
        path, gone = self._path(key), self._aside / f"{secrets.token_hex(16)}.gone"
        with contextlib.suppress(FileNotFoundError):
            self._aside.mkdir(parents=True, exist_ok=True)
            path.replace(gone)
            gone.unlink()
        with contextlib.suppress(OSError):  # not empty, or gone
            path.parent.rmdir()

    def _path(self, key: str) -> Path:
        return self._root / key / FILE_NAME

    # -- the start

    def _scan(self) -> None:
        """What is there already, and what a server that ended in the middle has left."""
        try:
            self._aside.mkdir(parents=True, exist_ok=True)
            found = sorted(self._found())
            with self._changed:
                for _, key, size in found:
                    self._index.add(key, size)
                while self._index.used > self._index.max_bytes and (oldest := self._index.oldest()) is not None:
                    self._remove(oldest)
            self._sweep()
        except OSError as error:
            log.warning("--embedding-dir %s cannot be used: %s", self._root, error)
        finally:
            self._scanned.set()

    def _found(self) -> Iterator[tuple[int, str, int]]:
        """(time of the last delivery, key, size) of every file."""
        with os.scandir(self._root) as entries:
            for entry in entries:
                if is_key(entry.name) and entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError):
                        about = self._path(entry.name).lstat()
                        if stat.S_ISREG(about.st_mode):
                            yield about.st_mtime_ns, entry.name, about.st_size

    def _sweep(self) -> None:
        """What is younger may be another server's, at work."""
        oldest = time.time() - _STALE_S
        for left in self._aside.iterdir():
            with contextlib.suppress(OSError):
                if left.lstat().st_mtime < oldest:
                    left.unlink()


def _check(stop: threading.Event) -> None:
    """Raises TimeoutError where nobody waits for this delivery any more."""
    if stop.is_set():
        raise TimeoutError("given up")


def _failed(key: str, why: str) -> EncoderError:
    return EncoderError(ErrorCode.DELIVERY_FAILED, f"the embedding cannot be written as the file of {key}: {why}")
