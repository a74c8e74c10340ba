"""Messages between the elected rank's keeper and its writer into receivers' memory, over their socket pair."""

from __future__ import annotations

from spmd_encoder.wire.messages import Message

# keeper -> writer (the socket pair that the writer was started with)


class ProbeSession(Message, frozen=True):
    """Ask whether anybody answers at `session`, which is `host:port`."""

    call_id: int
    session: str


class WriteMemory(Message, frozen=True):
    """Comes with a descriptor of `num_bytes` of memory, which are to be at `address` of the process at `session`."""

    call_id: int
    session: str
    address: int
    num_bytes: int


ToWriter = ProbeSession | WriteMemory


# writer -> keeper


class WriterReady(Message, frozen=True):
    """It has an engine; said once, before anything else."""


class WriterFailing(Message, frozen=True):
    """It ends because of this. `is_missing`: Mooncake cannot be imported."""

    reason: str
    is_missing: bool = False


class WriterAnswer(Message, frozen=True):
    """`error` is empty where the call has done what it should."""

    call_id: int
    error: str = ""


FromWriter = WriterReady | WriterFailing | WriterAnswer
