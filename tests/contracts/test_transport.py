"""What every transport keeps: bytes arrive as they are, a dead receiver is DELIVERY_FAILED, closing ends it for good.

To add a transport: write a `Rig` for it and name it in RIGS.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import safetensors.torch
import torch

from spmd_encoder.api.types import Embedding
from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.keeper.starter import SpawnStarter
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.transports.base import Parcel, ParcelHeader, PushEndpoint, RemoteMemory, Transport
from spmd_encoder.transports.budget import StagedBytes
from spmd_encoder.transports.registry import TRANSPORTS, Resources, load_writer
from spmd_encoder.transports.staged import Shelf
from tests.harness.landing import FAKE_MOONCAKE, Landing
from tests.harness.parcels import embedding, item
from tests.harness.sglang_receiver import Receiver

pytestmark = pytest.mark.timeout(60)


class Rig(Protocol):
    """One transport's receivers and destinations, in its own terms."""

    def parcel(self, rows: Embedding) -> Any: ...

    @asynccontextmanager
    def receiver(self, transport: Any) -> AsyncIterator[Any]:
        """A receiver that lives; yields its destination."""
        ...

    async def received(self, transport: Any, destination: Any) -> bytes:
        """The rows of one parcel, as the receiver has them."""
        ...

    def dead(self) -> Any:
        """A destination that nothing can reach; None where there can be none."""
        ...


class _Push:
    """Both dialects: a port where nobody listens is a dead receiver."""

    def dead(self) -> PushEndpoint:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return PushEndpoint("127.0.0.1", probe.getsockname()[1])


class SglangRig(_Push):
    def parcel(self, rows: Embedding) -> Parcel:
        header = ParcelHeader(
            part_id="p",
            num_parts=1,
            part_idx=0,
            modality=rows.modality,
            dtype=rows.dtype,
            rows=rows.shape[0],
            dim=rows.shape[1],
        )
        return Parcel(header=header, chunks=(rows.data,))

    @asynccontextmanager
    async def receiver(self, transport: Any) -> AsyncIterator[PushEndpoint]:
        with Receiver() as self._receiver:
            yield PushEndpoint(self._receiver.host, self._receiver.port)

    async def received(self, transport: Any, destination: Any) -> bytes:
        rows = (await self._receiver.message()).rows
        assert rows is not None
        return rows


class _Items:
    def parcel(self, rows: Embedding) -> Any:
        return item(rows)


class MooncakeRig(SglangRig):
    """A stand-in for Mooncake's engine, in the process that writes and here."""

    @asynccontextmanager
    async def receiver(self, transport: Any) -> AsyncIterator[RemoteMemory]:
        with Landing(2**20) as self._landing:
            yield self._landing.memory

    async def received(self, transport: Any, destination: Any) -> bytes:
        message = await self._landing.messages.message()
        assert message.rows is None
        return self._landing.buffer[: self._num_bytes].tobytes()

    def parcel(self, rows: Embedding) -> Parcel:
        parcel = super().parcel(rows)
        self._num_bytes = parcel.num_bytes
        return parcel

    def dead(self) -> Any:
        with Landing() as gone:
            return gone.memory


class ZmqRig(_Push, _Items):
    @asynccontextmanager
    async def receiver(self, transport: Any) -> AsyncIterator[PushEndpoint]:
        with EmbeddingReceiver(as_="torch") as self._receiver:
            yield PushEndpoint.parse(self._receiver.endpoint)

    async def received(self, transport: Any, destination: Any) -> bytes:
        return raw(self._receiver.receive(10).array)


class FileRig(_Items):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def receiver(self, transport: Any) -> AsyncIterator[str]:
        yield "a-key"

    async def received(self, transport: Any, destination: Any) -> bytes:
        path = self._folder / destination / "encoder_cache.safetensors"
        return raw(safetensors.torch.load_file(path)["ec_cache"])

    def dead(self) -> str:
        (self._folder / "taken").write_text("a file where a folder belongs")
        return "taken"


class StagedRig(_Items):
    @asynccontextmanager
    async def receiver(self, transport: Any) -> AsyncIterator[str]:
        yield Shelf.new_id()

    async def received(self, transport: Any, destination: Any) -> bytes:
        with transport.reading(destination) as rows:
            return bytes(rows.data)

    def dead(self) -> None:
        return None


RIGS = {
    "sglang": lambda _: SglangRig(),
    "mooncake": lambda _: MooncakeRig(),
    "zmq": lambda _: ZmqRig(),
    "file": FileRig,
    "staged": lambda _: StagedRig(),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_every_transport_is_held_to_this() -> None:
    assert RIGS.keys() == TRANSPORTS.keys()


@pytest.fixture(params=sorted(RIGS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return RIGS[request.param](tmp_path)


@pytest.fixture
async def transport(
    request: pytest.FixtureRequest, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Transport[Any, Any]]:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_MOONCAKE))
    config = Config()
    config = replace(
        config,
        destinations=replace(config.destinations, embedding_dir=str(tmp_path)),
        sglang=replace(config.sglang, send_timeout_s=20.0, encoder_transfer_backend="mooncake"),
    )
    name = request.node.callspec.params["rig"]
    writer = load_writer(config, SpawnStarter(), "127.0.0.1")
    run = DaemonThreads(2).run
    resources = Resources(budget=StagedBytes(2**30), run=run, run_look_ups=run, writer=writer)
    transport = TRANSPORTS[name](config, resources)
    yield transport
    await transport.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_bytes_arrive_as_they_are(rig: Rig, transport: Transport[Any, Any], dtype: str) -> None:
    rows = torch.randn(300, 64, generator=torch.manual_seed(1)).to(getattr(torch, dtype))
    sent = replace(embedding(300, 64, dtype=dtype), data=memoryview(raw(rows)))
    async with rig.receiver(transport) as destination:
        await transport.deliver(rig.parcel(sent), destination)
        assert await rig.received(transport, destination) == raw(rows)


async def test_a_dead_receiver_is_told_of_in_time(rig: Rig, transport: Transport[Any, Any]) -> None:
    destination = rig.dead()
    if destination is None:
        return
    with pytest.raises(EncoderError) as caught:
        await transport.deliver(rig.parcel(embedding()), destination)
    assert caught.value.code is ErrorCode.DELIVERY_FAILED
    assert str(destination) in caught.value.message
    async with rig.receiver(transport) as alive:  # nobody else suffers
        await transport.deliver(rig.parcel(embedding(fill=3)), alive)
        assert await rig.received(transport, alive) == bytes([3]) * 32


async def test_closing_twice_is_closing_once_and_nothing_goes_after_it(
    rig: Rig, transport: Transport[Any, Any]
) -> None:
    async with rig.receiver(transport) as destination:
        await transport.close()
        await transport.close()
        with pytest.raises(EncoderError, match="ending") as caught:
            await asyncio.wait_for(transport.deliver(rig.parcel(embedding()), destination), 10)
    assert caught.value.code is ErrorCode.DELIVERY_FAILED
