"""Where a command line's embeddings go: one file, shards that an interrupted job goes on with, or elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec
import numpy as np

from spmd_encoder.client.files import named, written_whole
from spmd_encoder.client.inputs import printable
from spmd_encoder.client.results import Result
from spmd_encoder.client.safetensors import write

JOB = "job.json"
INDEX = "index.jsonl"
# A shard is in memory until it is written.
_MAX_SHARD_BYTES = 2**30


class OutputError(Exception):
    """The output cannot be written as asked; one sentence."""


class Output(Protocol):
    """`add` is called in order, `close` once at the end. Both raise `WriteError`."""

    def is_done(self, name: str) -> bool:
        """Whether an earlier run has this picture already."""
        ...

    def add(self, result: Result) -> None: ...

    def close(self) -> None: ...


class SingleFile:
    """One safetensors file, a tensor per picture under its path; held in memory until `close`."""

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        _check_parent(path)
        self._path = path
        self._metadata = {name: str(value) for name, value in job.items() if value is not None}
        self._results: dict[str, Result] = {}

    def is_done(self, name: str) -> bool:
        return False

    def add(self, result: Result) -> None:
        if result.ok:
            self._results[printable(result.name)] = result

    def close(self) -> None:
        write(self._path, {name: result.tensor() for name, result in self._results.items()}, self._metadata)


class NumpyFile:
    """One `.npy` of `[pictures, dim]`, a row per picture in order (NaN where it failed), and `<file>.txt` with
    their names, a line each."""

    def __init__(self, path: Path) -> None:
        _check_parent(path)
        self._path = path
        self._results: list[Result] = []

    def is_done(self, name: str) -> bool:
        return False

    def add(self, result: Result) -> None:
        self._results.append(result)

    def close(self) -> None:
        dim = next((result.shape[0] for result in self._results if result.ok), 0)
        rows = np.full((len(self._results), dim), np.nan, np.float32)
        for row, result in zip(rows, self._results, strict=True):
            if result.ok:
                row[:] = result.numpy()
        with written_whole(self._path) as out:
            # As np.save writes it, which does not say why a write failed.
            np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(rows))
            out.write(rows.reshape(-1).view(np.uint8).data)
        names = "".join(f"{printable(result.name)}\n" for result in self._results)
        with written_whole(self._path.with_name(f"{self._path.name}.txt")) as out:
            out.write(names.encode())


class Receipts:
    """A JSON line per picture that the server has delivered elsewhere: its path, digest, shape, dtype, grid, and where
    it is. Nothing is kept, so that a command that is given again delivers all again."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def is_done(self, name: str) -> bool:
        return False

    def add(self, result: Result) -> None:
        if result.ok:
            line = {
                "path": printable(result.name),
                **_facts(result),
                "delivered": msgspec.to_builtins(result.delivered),
            }
            print(json.dumps(line), file=self._out, flush=True)

    def close(self) -> None:
        pass


class ShardFolder:
    """A folder with `00000.safetensors`, ... of `items_per_file` pictures each (fewer where they are large), and
    `index.jsonl`.

    The index has a line per picture (the last one counts): its path and shard, digest, shape, dtype, grid; or its
    path and error. A shard is whole before its lines are written, so that a run that was cut off loses at most the
    shard it was filling; the next run goes on, and tries again what failed. `job.json` keeps it from mixing models
    or outputs. A file that was changed under the same path is not noticed.
    """

    def __init__(self, folder: Path, job: dict[str, Any], items_per_file: int) -> None:
        self._folder = folder
        self._job = job
        self._items_per_file = items_per_file
        self._pending: list[Result] = []
        self._pending_bytes = 0
        self._open_job()
        self._done, self._next = self._read_index()

    def is_done(self, name: str) -> bool:
        return printable(name) in self._done

    def add(self, result: Result) -> None:
        self._pending.append(result)
        self._pending_bytes += len(result.data)
        if len(self._pending) >= self._items_per_file or self._pending_bytes >= _MAX_SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()

    def _open_job(self) -> None:
        if self._folder.exists() and not self._folder.is_dir():
            raise OutputError(f"--out {self._folder} is there already and is no folder")
        with named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / JOB
        if path.exists():
            if json.loads(path.read_text()) != self._job:
                raise OutputError(f"{self._folder} holds another job ({JOB}: {path.read_text().strip()}); name another")
        elif any(self._folder.iterdir()):
            raise OutputError(f"{self._folder} is not empty and holds no job of this command; name another folder")
        else:
            with written_whole(path) as out:
                out.write(f"{json.dumps(self._job)}\n".encode())

    def _read_index(self) -> tuple[set[str], int]:
        """Pictures that are done, and the next shard's number. Cuts off a last line that was not written whole."""
        path = self._folder / INDEX
        done: set[str] = set()
        shards = [-1]
        if not path.exists():
            return done, 0
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            entry = json.loads(line)
            if "shard" in entry:
                done.add(entry["path"])
                shards.append(int(entry["shard"].partition(".")[0]))
        return done, max(shards) + 1

    def _flush(self) -> None:
        if not self._pending:
            return
        # Whatever comes of it: a failed attempt is not repeated behind a line that was cut off.
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        shard = f"{self._next:05}.safetensors"
        good = {printable(result.name): result.tensor() for result in pending if result.ok}
        if good:
            write(self._folder / shard, good, {name: str(value) for name, value in self._job.items()})
            self._next += 1
        path = self._folder / INDEX
        with named(path), path.open("a", encoding="utf-8") as index:
            index.writelines(json.dumps(_line(result, shard)) + "\n" for result in pending)
            index.flush()
            os.fsync(index.fileno())


def _check_parent(path: Path) -> None:
    """Now, and not when all the work is done."""
    if not path.parent.is_dir():
        raise OutputError(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise OutputError(f"--out {path} is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"--out {path}: the folder {path.parent} may not be written to")


def _line(result: Result, shard: str) -> dict[str, Any]:
    path = printable(result.name)
    if result.error is not None:
        return {"path": path, "error": {"code": result.error.code, "message": result.error.message}}
    return {"path": path, "shard": shard, **_facts(result)}


def _facts(result: Result) -> dict[str, Any]:
    return {
        "digest": result.digest,
        "shape": result.shape,
        "dtype": result.dtype,
        "grid": result.grid,
        "num_tokens": result.num_tokens,
        "modality": result.modality,
        **({"details": result.details} if result.details else {}),
    }
