"""The entry of every process that a keeper starts, forked or spawned: read the specification, become it."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path

from spmd_encoder.config import Config
from spmd_encoder.keeper.fate import die_with_parent
from spmd_encoder.keeper.signals import ignore_signals
from spmd_encoder.keeper.starter import child_starter
from spmd_encoder.wire.messages import ChildSpec, PreparerSpec, StoreSpec, WorkerSpec, WriterSpec
from spmd_encoder.wire.streams import Pipe


def run_child(sock: socket.socket) -> int:
    """Exit code of the process. The modules are imported by name: the keeper must never import torch."""
    pipe = Pipe(sock)
    try:
        spec = pipe.receive_blocking(ChildSpec)
    except ConnectionError:
        return 0
    match spec:
        case WorkerSpec():
            starter = child_starter(Path(spec.run_dir), Config.from_json(spec.config).lifecycle)
            return int(importlib.import_module("spmd_encoder.runtime.compute").run_worker(spec, pipe, starter))
        case PreparerSpec():
            return int(importlib.import_module("spmd_encoder.runtime.preparer").run_preparer(spec, sock))
        case StoreSpec():
            return int(importlib.import_module("spmd_encoder.distributed.store_host").host_store(spec, pipe))
        case WriterSpec():
            return int(importlib.import_module("spmd_encoder.transports.memory_host").host_engine(spec, sock))
        case _:
            raise AssertionError(f"unknown specification {type(spec).__name__}")


def main() -> int:
    """`python -m spmd_encoder.keeper.child FD PARENT`: the spawned form."""
    die_with_parent(int(sys.argv[2]))
    ignore_signals()  # as a forked one inherits it from the nursery
    code = run_child(socket.socket(fileno=int(sys.argv[1])))
    # Not sys.exit: destructors of process groups and sockets must not run on a half-stopped process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
