"""Streams and pipes: whole frames whatever the pieces, and no noise beyond WireError."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from spmd_encoder.wire.codec import Codec, WireError
from spmd_encoder.wire.messages import Beat, FromWorker, Stop, StopWorker, ToKeeper, ToWorker
from spmd_encoder.wire.streams import MAX_FRAME_BYTES, Listener, Pipe, Stream, connect, over_socket


def frame(message: Any) -> bytes:
    body = Codec[Any](FromWorker).encode(message)
    return struct.pack(">I", len(body)) + body


def beat(number: int) -> Beat:
    return Beat(last_order=number, busy_s=0.5, preloaded=True)


def long_beat(numbers: tuple[int, ...]) -> Beat:
    return Beat(last_order=0, busy_s=0.5, preloaded=True, preparers=numbers)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
async def stream(pair: tuple[socket.socket, socket.socket]) -> AsyncIterator[Stream[Any]]:
    stream = await over_socket(pair[0], FromWorker)
    yield stream
    stream.close()
    await asyncio.sleep(0)


async def receive(stream: Stream[Any]) -> Any:
    return await asyncio.wait_for(stream.receive(), 30)


async def test_frames_may_come_in_any_pieces(stream: Stream[Any], pair: tuple[socket.socket, socket.socket]) -> None:
    data = b"".join(frame(beat(n)) for n in range(3))
    got = asyncio.create_task(receive(stream))
    for position in range(len(data) - 5):
        pair[1].send(data[position : position + 1])
        await asyncio.sleep(0)
    assert await got == beat(0)
    assert await receive(stream) == beat(1)
    pair[1].send(data[-5:])
    assert await receive(stream) == beat(2)


@pytest.mark.parametrize("cut", [0, 2, 4, 10])
async def test_a_peer_that_goes_is_none(
    stream: Stream[Any], pair: tuple[socket.socket, socket.socket], cut: int
) -> None:
    pair[1].send(frame(beat(1)) + frame(beat(2))[:cut])
    pair[1].close()
    assert await receive(stream) == beat(1)
    assert await receive(stream) is None
    assert await receive(stream) is None


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 0),
    ],
)
async def test_noise_is_a_wire_error(
    stream: Stream[Any], pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    pair[1].send(data)
    with pytest.raises(WireError):
        await receive(stream)


async def test_the_wrong_direction_is_a_wire_error(
    stream: Stream[Any], pair: tuple[socket.socket, socket.socket]
) -> None:
    Pipe(pair[1]).send(StopWorker())
    with pytest.raises(WireError):
        await receive(stream)


async def test_the_largest_frame_is_let_through(stream: Stream[Any], pair: tuple[socket.socket, socket.socket]) -> None:
    message = long_beat((2**40,) * (MAX_FRAME_BYTES // 9 - 10))
    assert MAX_FRAME_BYTES - 200 < len(frame(message)) <= MAX_FRAME_BYTES + 4
    thread = threading.Thread(target=Pipe(pair[1]).send, args=(message,))
    thread.start()
    assert await receive(stream) == message
    thread.join(30)


async def test_send_and_flush_to_a_lost_peer_raise_nothing(
    stream: Stream[Any], pair: tuple[socket.socket, socket.socket]
) -> None:
    pair[1].close()
    for _ in range(50):
        stream.send(StopWorker())
        await stream.flush(0.1)
    assert await receive(stream) is None
    stream.close()
    stream.send(StopWorker())


async def test_flush_does_not_wait_for_ever_for_a_peer_that_does_not_read(stream: Stream[Any]) -> None:
    for _ in range(20):
        stream.send(long_beat((2**40,) * 20_000))
    await asyncio.wait_for(stream.flush(0.05), 30)


def test_a_pipe_talks_before_there_is_a_loop(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = map(Pipe, pair)
    theirs.send(StopWorker())
    assert ours.receive_blocking(ToWorker) == StopWorker()

    def send_in_two() -> None:
        for piece in (frame(beat(3))[:6], frame(beat(3))[6:]):
            time.sleep(0.02)
            pair[1].send(piece)

    sender = threading.Thread(target=send_in_two)
    sender.start()
    assert ours.receive_blocking(FromWorker) == beat(3)
    sender.join()
    pair[1].send(frame(beat(3))[:6])
    pair[1].close()
    with pytest.raises(ConnectionError):
        ours.receive_blocking(FromWorker)


async def test_many_threads_keep_their_frames_whole(pair: tuple[socket.socket, socket.socket]) -> None:
    """Through a buffer that is far smaller than what is sent, without and then with a waiting reader."""
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    pair[1].setblocking(False)
    pipe = Pipe(pair[1])
    each, senders = 15, 6

    def send(sender: int) -> None:
        for number in range(each):
            pipe.send(long_beat((sender, number, *range(8_000))))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(senders)]
    for thread in threads:
        thread.start()
    await asyncio.sleep(0.1)
    assert any(thread.is_alive() for thread in threads), "the buffer was to be full"
    stream: Stream[Any] = await over_socket(pair[0], FromWorker)
    got = [(await receive(stream)).preparers for _ in range(each * senders)]
    stream.close()
    for thread in threads:
        thread.join(30)
    for sender in range(senders):
        assert [ids[1] for ids in got if ids[0] == sender] == list(range(each))
    assert all(ids[2:] == tuple(range(8_000)) for ids in got)


def test_a_message_survives_its_senders_sigkill(pair: tuple[socket.socket, socket.socket]) -> None:
    child = os.fork()
    if child == 0:
        Pipe(pair[1]).send(beat(41))
        os.kill(os.getpid(), signal.SIGKILL)
    pair[1].close()
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    keeper = Pipe(pair[0])
    assert keeper.receive_blocking(FromWorker) == beat(41)
    with pytest.raises(ConnectionError):
        keeper.receive_blocking(FromWorker)


def test_a_pipe_without_a_reader_raises_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    pipe = Pipe(pair[1])
    for number in range(10):
        pipe.send(beat(number))
    pair[1].close()
    pipe.send(beat(11))


@pytest.mark.parametrize("kind", ["unix", "tcp", "tcp6"])
async def test_listen_and_connect(kind: str, tmp_path: Path) -> None:
    got: asyncio.Queue[Any] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_end: Stream[Any] = Stream(reader, writer, FromWorker)
        got.put_nowait(await server_end.receive())
        server_end.send(Stop(exit_code=3, reason="so"))
        await server_end.flush()
        server_end.close()

    host = {"tcp": "127.0.0.1", "tcp6": "::1"}.get(kind, "")
    try:
        listener = await Listener.open(accept, path=None if host else tmp_path / "s", host=host)
    except OSError:
        pytest.skip("no IPv6 here")
    stream = await connect(listener.address, ToKeeper)
    stream.send(beat(5))
    assert await asyncio.wait_for(got.get(), 30) == beat(5)
    assert await receive(stream) == Stop(exit_code=3, reason="so")
    assert await receive(stream) is None
    stream.close()
    listener.close()
    await asyncio.sleep(0)
    with pytest.raises(OSError):
        await connect(listener.address, ToKeeper)
