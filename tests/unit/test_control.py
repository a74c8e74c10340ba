"""The dispatcher's control connections: those that say nothing, half a frame or too much cost it nothing."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.dispatcher.control import MAX_HELLO_BYTES, MAX_UNKNOWN, ControlServer
from spmd_encoder.wire.codec import Codec
from spmd_encoder.wire.messages import PROTOCOL_VERSION, FromKeeper, KeeperHello, NurseryStarted, Stop, ToKeeper
from spmd_encoder.wire.streams import connect

pytestmark = pytest.mark.timeout(30)

PROCESS = ProcessInfo(rank=0, dp_rank=0, tp_rank=0, role="keeper", pid=1, epoch=None)
HELLO = KeeperHello(protocol=PROTOCOL_VERSION, token="t", rank=0, process=PROCESS, nursery=None, versions={})


@dataclass
class Served:
    address: str
    server: ControlServer
    heard: list[Any] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def knock(self, data: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(self.address.removeprefix("unix:"))
        writer.write(data)
        self.writers.append(writer)
        return reader

    async def good_path(self) -> None:
        """A keeper is heard, and told."""
        before = len(self.heard)
        stream = await connect(self.address, ToKeeper)
        stream.send(HELLO)
        stream.send(NurseryStarted(process=PROCESS))
        async with asyncio.timeout(30):
            while len(self.heard) < before + 2:
                await asyncio.sleep(0.005)
        self.server.send(0, Stop(exit_code=0))
        assert await asyncio.wait_for(stream.receive(), 30) == Stop(exit_code=0)
        stream.close()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    heard: list[Any] = []
    lost: list[int] = []
    server = ControlServer("t", 2, heard.append, lost.append)
    served = Served(await server.open(path=tmp_path / "control", host=""), server, heard, lost)
    yield served
    for writer in served.writers:
        writer.close()
    server.close()
    await asyncio.sleep(0)


async def test_many_silent_strangers_are_closed_oldest_first(served: Served) -> None:
    readers = [await served.knock(b"\0\0") for _ in range(MAX_UNKNOWN + 10)]
    for reader in readers[:10]:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.read(), 30)
            raise ConnectionError  # an orderly end is one, too
    await served.good_path()
    assert not any(reader.at_eof() for reader in readers[20:])


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_HELLO_BYTES + 1),
        struct.pack(">I", 2**32 - 1) + bytes(100_000),
        struct.pack(">I", 5) + b"\xc1" * 5,
        struct.pack(">I", 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_noise_is_hung_up_on_and_not_quoted(
    served: Served, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader = await served.knock(data + b"GET /secret")
    assert await asyncio.wait_for(reader.read(), 30) == b""
    await served.good_path()
    assert "secret" not in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_wrong_token_is_not_heard(served: Served) -> None:
    for token in ("", "T", "t" * 60_000, "tü"):
        body = Codec[Any](FromKeeper).encode(
            KeeperHello(protocol=PROTOCOL_VERSION, token=token, rank=0, process=PROCESS, nursery=None, versions={})
        )
        reader = await served.knock(struct.pack(">I", len(body)) + body)
        assert await asyncio.wait_for(reader.read(), 30) == b""
    assert served.heard == [] and served.lost == []
    await served.good_path()
