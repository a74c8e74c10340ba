"""The calls of Mooncake's `TransferEngine` that are used here, over plain TCP: real processes, real memory, no package.

Like the real one, the receiving side writes only where it has registered memory, and says so otherwise.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from contextlib import suppress
from typing import IO

_HEAD = struct.Struct("<BQQ")  # what, address, bytes
PROBE, WRITE = 0, 1


class TransferEngine:
    """`gate` holds back the receiving side of writes, `open_for_probes` that of probes."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.open_for_probes = threading.Event()
        self.open_for_probes.set()
        self.begun = threading.Semaphore(0)
        """Released when a write has arrived at this side."""
        self.num_writes = 0
        self._memory: dict[int, int] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._port = 0

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        if device == "broken":
            return -1
        if device == "fatal":
            os.abort()
        assert metadata == "P2PHANDSHAKE" and protocol in {"rdma", "tcp", "efa"}
        self._listener = socket.create_server((host, 0), backlog=64)
        self._port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, num_bytes: int) -> int:
        if any(start < address + num_bytes and address < start + size for start, size in self._memory.items()):
            return -600
        self._memory[address] = num_bytes
        return 0

    def unregister_memory(self, address: int) -> int:
        with self._lock:  # not while something is written there
            del self._memory[address]
        return 0

    def send_probe(self, session: str) -> int:
        try:
            with self._connect(session) as peer:
                peer.sendall(_HEAD.pack(PROBE, 0, 0))
                return 0 if peer.recv(1) == b"\0" else -102
        except OSError:
            return -102

    def transfer_sync_write(self, session: str, address: int, peer_address: int, num_bytes: int) -> int:
        if not self._is_registered(address, num_bytes):
            return -1
        try:
            with self._connect(session) as peer:
                peer.sendall(_HEAD.pack(WRITE, peer_address, num_bytes))
                peer.sendall((ctypes.c_char * num_bytes).from_address(address))
                return 0 if peer.recv(1) == b"\0" else -1
        except OSError:
            return -1

    # -- the receiving side

    def close(self) -> None:
        """As if this process had died, for new connections. May be called again."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _connect(self, session: str) -> socket.socket:
        host, _, port = session.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)))

    def _is_registered(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self._memory.items())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            head = stream.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            what, address, num_bytes = _HEAD.unpack(head)
            with suppress(OSError):  # whoever asked has died
                peer.sendall(self._probed() if what == PROBE else self._written(address, stream, num_bytes))

    def _probed(self) -> bytes:
        self.open_for_probes.wait()
        return b"\0"

    def _written(self, address: int, stream: IO[bytes], num_bytes: int) -> bytes:
        self.begun.release()
        self.gate.wait()
        data = stream.read(num_bytes)
        with self._lock:
            if len(data) < num_bytes or not self._is_registered(address, num_bytes):
                return b"\1"
            ctypes.memmove(address, data, num_bytes)
            self.num_writes += 1
        return b"\0"
