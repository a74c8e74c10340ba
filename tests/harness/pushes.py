"""Pushing for tests: parcels, the transport, and receivers that can be stopped, killed, or are slow."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import Parcel, ParcelError, ParcelHeader, PushEndpoint
from spmd_encoder.transports.sglang_frames import ClassPath, SglangFraming
from spmd_encoder.transports.zmq_push import ZmqPush
from spmd_encoder.transports.zmtp import HELLO, message
from tests.harness import zmtp
from tests.harness.sglang_receiver import CURRENT, Receiver

FRAMING = SglangFraming(ClassPath(CURRENT, "EmbeddingData"))
MIB = 2**20
STUBBORN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
kept = []
while True:
    kept.append(listener.accept())
"""
"""Accepts and says nothing."""
PULLER = """
import time, zmq
pull = zmq.Context().socket(zmq.PULL)
pull.setsockopt(zmq.RCVHWM, 1)
print(pull.bind_to_random_port("tcp://127.0.0.1"), flush=True)
pull.recv_multipart()
print("got", flush=True)
time.sleep(1000)
"""
"""Takes one message."""
PING = zmtp.frame(b"\x04PING\0\0", zmtp.COMMAND)


@dataclass
class Child:
    """A receiver in a process of its own, which can be stopped and killed."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __post_init__(self) -> None:
        self.endpoint = PushEndpoint("127.0.0.1", int(self.line()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def children() -> Iterator[Callable[[str], Child]]:
    """Starts code as receivers, which are ended with the context."""
    started: list[Child] = []

    def new(code: str) -> Child:
        started.append(Child(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)))
        return started[-1]

    yield new
    for child in started:
        child.kill()


def parcel(rows: int = 2, dim: int = 4, part_id: str = "r_local_part_0", fill: int = 1) -> Parcel:
    header = ParcelHeader(
        part_id=part_id,
        num_parts=1,
        part_idx=0,
        modality=Modality.IMAGE,
        grids=((1, 2, rows),),
        dtype="float32",
        rows=rows,
        dim=dim,
    )
    return Parcel(header=header, chunks=(bytes([fill]) * (rows * dim * 4),))


def failure(part_id: str = "r_local_part_0") -> Parcel:
    header = ParcelHeader(part_id=part_id, num_parts=1, part_idx=0, modality=Modality.IMAGE)
    return Parcel(header=header, error=ParcelError(status=503, message="full"))


def to(receiver: Receiver) -> PushEndpoint:
    return PushEndpoint(receiver.host, receiver.port)


BIG = parcel(rows=256, dim=1024)
"""1 MiB, of which a receiver that reads nothing has a part."""


Make = Callable[..., ZmqPush[Parcel]]


@asynccontextmanager
async def pushes() -> AsyncIterator[Make]:
    """Makes transports with other settings than these, which are closed with the context."""
    made: list[ZmqPush[Parcel]] = []

    def new(**settings: Any) -> ZmqPush[Parcel]:
        made.append(ZmqPush(FRAMING, **{"timeout_s": 10.0, "max_peer_bytes": 64 * MIB, **settings}))
        return made[-1]

    yield new
    for push in made:
        await push.close()


async def fails(push: ZmqPush[Parcel], endpoint: PushEndpoint, sent: Parcel | None = None) -> str:
    with pytest.raises(EncoderError) as caught:
        await push.deliver(sent or parcel(), endpoint)
    assert caught.value.code is ErrorCode.DELIVERY_FAILED
    assert str(endpoint) in caught.value.message
    return caught.value.message


async def stopped(push: ZmqPush[Parcel], child: Child) -> None:
    """Stop the receiver while it is connected and has nothing to do."""
    await push.deliver(parcel(), child.endpoint)
    assert await asyncio.to_thread(child.line) == "got"
    os.kill(child.process.pid, signal.SIGSTOP)


def taken(sock: socket.socket, until: int | None = None) -> bytes:
    """What comes until so many bytes have, or until the end."""
    data = b""
    while (until is None or len(data) < until) and (piece := sock.recv(2**16)):
        data += piece
    return data


@dataclass
class SlowPuller:
    """A PULL socket by hand, which reads when it is told to."""

    listener: socket.socket

    def __post_init__(self) -> None:
        self.endpoint = PushEndpoint("127.0.0.1", self.listener.getsockname()[1])

    def shake_hands(self) -> socket.socket:
        sock, _ = self.listener.accept()
        sock.settimeout(10)
        taken(sock, len(HELLO))
        sock.sendall(zmtp.greeting(b"NULL") + zmtp.ready(b"READY", b"PULL"))
        return sock


@contextmanager
def slow_puller() -> Iterator[SlowPuller]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield SlowPuller(listener)


async def sent_to(slow: SlowPuller, push: ZmqPush[Parcel], big: Parcel) -> socket.socket:
    sock, _ = await asyncio.gather(asyncio.to_thread(slow.shake_hands), push.deliver(big, slow.endpoint))
    return sock


def wire_bytes(big: Parcel) -> bytes:
    return b"".join(message(FRAMING(big)))
