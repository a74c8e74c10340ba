"""`EmbeddingReceiver` against the server's own transport and against strangers, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import zmq

from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.errors import EncoderError
from spmd_encoder.transports.base import ItemParcel, PushEndpoint
from spmd_encoder.transports.item_frames import item_frames
from spmd_encoder.transports.zmq_push import ZmqPush
from tests.harness.parcels import embedding, failed_item, item

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def receiver() -> Iterator[EmbeddingReceiver]:
    with EmbeddingReceiver() as receiver:
        yield receiver


@pytest.fixture
def stranger(receiver: EmbeddingReceiver) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(receiver.endpoint)
    yield push
    context.destroy(linger=0)


async def deliver(receiver: EmbeddingReceiver, *parcels: ItemParcel) -> None:
    push = ZmqPush(item_frames, timeout_s=10.0, max_peer_bytes=2**30)
    try:
        for parcel in parcels:
            await push.deliver(parcel, PushEndpoint.parse(receiver.endpoint))
    finally:
        await push.close()


def test_items_come_in_order_failures_too(receiver: EmbeddingReceiver) -> None:
    asyncio.run(deliver(receiver, item(index=0), failed_item(1), item(index=2)))
    got = [receiver.receive(timeout_s=10) for _ in range(3)]
    assert [header.index for header, _ in got] == [0, 1, 2]
    assert got[1].array is None and got[1].header.error is not None
    assert got[2].array.tobytes() == bytes([2]) * 32
    with pytest.raises(TimeoutError):
        receiver.receive(timeout_s=0.05)


def test_a_plain_loop(receiver: EmbeddingReceiver) -> None:
    asyncio.run(deliver(receiver, *(item(index=n) for n in range(4))))
    seen = []
    for header, array in receiver:
        seen.append((header.index, array.shape))
        if header.index == 3:
            break
    assert seen == [(n, (2, 4)) for n in range(4)]


async def test_an_asynchronous_loop(receiver: EmbeddingReceiver) -> None:
    sending = asyncio.create_task(deliver(receiver, *(item(index=n) for n in range(4))))
    async for header, array in receiver:
        assert array.tobytes() == bytes([header.index]) * 32
        if header.index == 3:
            break
    await sending
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await receiver.receive_async()
    await deliver(receiver, item(index=7))
    assert (await receiver.receive_async()).header.index == 7, "a wait that was cancelled loses nothing"


def test_as_tensors() -> None:
    with EmbeddingReceiver(as_="torch") as receiver:
        asyncio.run(deliver(receiver, item(embedding(3, 5, dtype="bfloat16"))))
        _, tensor = receiver.receive(10)
    assert tensor.dtype is torch.bfloat16 and tensor.shape == (3, 5)


def test_a_stranger_is_dropped_and_counted(
    receiver: EmbeddingReceiver, stranger: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            stranger.send_multipart([b"\x80\x04cos\nsystem\n", b"rows"])
        stranger.send_multipart([bytes(frame) for frame in item_frames(item(index=5))])
        assert receiver.receive(10).header.index == 5
    assert receiver.num_rejected == 100
    assert 1 <= len(caplog.records) <= 7


def test_a_message_too_large_cuts_its_sender_off() -> None:
    with EmbeddingReceiver(max_bytes=100_000) as receiver:
        with pytest.raises(EncoderError, match="closed the connection"):
            asyncio.run(deliver(receiver, item(embedding(1000, 2000))))
        asyncio.run(deliver(receiver, item(embedding(10, 20))))
        assert receiver.receive(10).array.shape == (10, 20)


def test_what_does_not_speak_zmq(receiver: EmbeddingReceiver) -> None:
    _, _, port = receiver.endpoint.rpartition(":")
    with socket.create_connection(("127.0.0.1", int(port))) as talker:
        talker.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        asyncio.run(deliver(receiver, item()))
        assert receiver.receive(10).header.index == 0


def test_addresses() -> None:
    with EmbeddingReceiver("0.0.0.0", advertised_host="node-7.example") as everywhere:
        assert everywhere.endpoint.startswith("tcp://node-7.example:")
    with EmbeddingReceiver("::1") as six:
        assert six.endpoint.startswith("tcp://[::1]:")
        asyncio.run(deliver(six, item()))
        port = PushEndpoint.parse(six.endpoint).port
        with pytest.raises(OSError, match="in use"):
            EmbeddingReceiver("::1", port)
    for bad in ({"host": "0.0.0.0"}, {"max_bytes": 0}, {"max_queued": 0}):
        with pytest.raises(ValueError):
            EmbeddingReceiver(**bad)  # type: ignore[arg-type]


def test_closing_ends_it(receiver: EmbeddingReceiver) -> None:
    receiver.close()
    receiver.close()
    assert list(receiver) == []
    with pytest.raises(ValueError, match="closed"):
        receiver.receive(1)


async def test_closing_after_asynchronous_use() -> None:
    receiver = EmbeddingReceiver()
    waiting = asyncio.create_task(receiver.receive_async())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.to_thread(receiver.close)


def test_it_needs_neither_torch_nor_the_server() -> None:
    code = (
        "import sys, spmd_encoder.client.receiver; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'fastapi', 'spmd_encoder.transports')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_client_alone_needs_no_zmq() -> None:
    code = "import sys, spmd_encoder.client; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
