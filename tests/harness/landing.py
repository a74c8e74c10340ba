"""A receiver of SGLang's mooncake backend for tests: registered memory, an engine, and a socket for the messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from spmd_encoder.transports.base import PushEndpoint, RemoteMemory
from tests.harness.fake_mooncake.mooncake.engine import TransferEngine
from tests.harness.sglang_receiver import Receiver

FAKE_MOONCAKE = Path(__file__).parent / "fake_mooncake"
"""For PYTHONPATH of the process that writes."""


class Landing:
    """One rank: `buffer` is all zeros until something is written there."""

    def __init__(self, num_bytes: int = 4096) -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.buffer = np.zeros(num_bytes, np.uint8)
        self.engine.register_memory(self.address, num_bytes)
        self.messages = Receiver()

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data)

    @property
    def session(self) -> str:
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    @property
    def memory(self) -> RemoteMemory:
        session = PushEndpoint("127.0.0.1", self.engine.get_rpc_port())
        return RemoteMemory(PushEndpoint(self.messages.host, self.messages.port), session, self.address)

    def body(self, **fields: Any) -> dict[str, Any]:
        """What this rank says with `/send`, without what it repeats of the sizes."""
        return {
            "prefill_host": self.messages.host,
            "embedding_port": self.messages.port,
            "session_id": self.session,
            "buffer_address": self.address,
            "receive_count": 1,
            **fields,
        }

    def __enter__(self) -> Landing:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.unregister_memory(self.address)  # what comes late must not be written into memory that is freed
        self.engine.gate.set()
        self.engine.open_for_probes.set()
        self.engine.close()
        self.messages.close()
