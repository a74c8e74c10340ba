"""The process that writes into receivers' memory: Mooncake's engine, and a thread for each call.

What a stranger's request names is connected to and parsed in native code here, away from the keeper: a crash costs the
writes under way. It knows no more of the server than the rows that it writes.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import socket
import threading
from contextlib import closing
from typing import Any

import setproctitle

from spmd_encoder.wire.messages import WriterSpec
from spmd_encoder.wire.streams import Pipe, receive_with_descriptor
from spmd_encoder.wire.writing import ProbeSession, ToWriter, WriteMemory, WriterAnswer, WriterFailing, WriterReady

_METADATA = "P2PHANDSHAKE"  # engines ask one another, and no server


def host_engine(spec: WriterSpec, sock: socket.socket) -> int:
    """Serve until the keeper hangs up. The process's exit code."""
    setproctitle.setproctitle("spmd_encoder writer")
    pipe = Pipe(sock)
    try:
        engine = _engine(spec)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        pipe.send(WriterFailing(reason=reason, is_missing=isinstance(error, ImportError)))
        return 1
    pipe.send(WriterReady())
    while True:
        try:
            call, descriptor = receive_with_descriptor(sock, ToWriter)
        except (ConnectionError, OSError):
            return 0
        threading.Thread(target=_answer, args=(pipe, engine, call, descriptor), daemon=True).start()


def _engine(spec: WriterSpec) -> Any:
    """Raises ImportError where Mooncake or a library of its is missing, RuntimeError where it cannot begin."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    code = engine.initialize(spec.host, _METADATA, spec.protocol, spec.device)
    if code != 0:
        raise RuntimeError(f"its engine does not start as {spec.host!r} over {spec.protocol} (code {code})")
    return engine


def _answer(pipe: Pipe, engine: Any, call: ProbeSession | WriteMemory, descriptor: int | None) -> None:
    try:
        match call:
            case ProbeSession():
                code = engine.send_probe(call.session)
                error = f"nobody answers there (code {code})" if code else ""
            case WriteMemory():
                assert descriptor is not None
                code = _write(engine, call, descriptor)
                error = f"Mooncake could not write all of it (code {code})" if code else ""
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    pipe.send(WriterAnswer(call_id=call.call_id, error=error))


def _write(engine: Any, call: WriteMemory, descriptor: int) -> int:
    """Mooncake's code, 0 for success. Rows are within reach of others only while they are being written."""
    try:
        rows = mmap.mmap(descriptor, call.num_bytes)
    finally:
        os.close(descriptor)
    with closing(rows):
        view = (ctypes.c_char * call.num_bytes).from_buffer(rows)
        address = ctypes.addressof(view)
        try:
            if code := engine.register_memory(address, call.num_bytes):
                raise RuntimeError(f"Mooncake does not take the rows' memory (code {code})")
            try:
                return int(engine.transfer_sync_write(call.session, address, call.address, call.num_bytes))
            finally:
                engine.unregister_memory(address)
        finally:
            del view  # or the mapping could not be closed
