"""Pushing to receivers that are slow, stopped, lost, strange or hostile."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.shared import new_resources
from spmd_encoder.transports.base import Parcel, PushEndpoint
from spmd_encoder.transports.registry import load_item_push
from tests.harness import zmtp
from tests.harness.parcels import item
from tests.harness.pushes import (
    BIG,
    MIB,
    PING,
    PULLER,
    STUBBORN,
    Child,
    Make,
    SlowPuller,
    children,
    fails,
    parcel,
    pushes,
    sent_to,
    slow_puller,
    stopped,
    taken,
    to,
    wire_bytes,
)
from tests.harness.sglang_receiver import Receiver

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with pushes() as new:
        yield new


@pytest.fixture
def start() -> Iterator[Callable[[str], Child]]:
    with children() as new:
        yield new


@pytest.fixture
def slow() -> Iterator[SlowPuller]:
    with slow_puller() as puller:
        yield puller


async def test_a_receiver_that_does_not_speak_zmq(make: Make) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await fails(make(timeout_s=1000.0), PushEndpoint("127.0.0.1", port))
    server.close()


async def test_a_receiver_that_never_greets_costs_its_own_time_only(make: Make, start: Callable[[str], Child]) -> None:
    push = make(timeout_s=5.0)
    stuck = asyncio.create_task(fails(push, start(STUBBORN).endpoint))
    with Receiver() as receiver:
        for _ in range(3):
            await push.deliver(parcel(), to(receiver))
            await receiver.message()
        assert not stuck.done()
        assert "took nothing for 5 s" in await stuck


async def test_names_that_take_long_keep_no_other_work_of_the_server_from_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor its end, for which a loop's own threads are waited."""
    told, real = threading.Event(), socket.getaddrinfo

    def slow_names(*args: Any, flags: int = 0, **options: Any) -> Any:
        if not flags:
            told.wait(30)
        return real(*args, flags=flags, **options)

    push = load_item_push(Config(), new_resources(Config()))
    monkeypatch.setattr(socket, "getaddrinfo", slow_names)
    names = [PushEndpoint(f"host-{n}.invalid", 5) for n in range(64)]
    waiting = [asyncio.create_task(push.deliver(item(), name)) for name in names]
    await asyncio.sleep(0.05)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(int), 10) == 0
        await push.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("ending" in str(outcome) for outcome in outcomes)
    finally:
        told.set()


async def test_a_stopped_receiver_fails_in_time_and_holds_no_more(make: Make, start: Callable[[str], Child]) -> None:
    child = start(PULLER)
    push = make(timeout_s=5.0, max_peer_bytes=100 * MIB)
    await stopped(push, child)
    big = parcel(rows=1024, dim=8192)  # 32 MiB
    waiting = [asyncio.create_task(push.deliver(big, child.endpoint)) for _ in range(3)]
    while push._peers[child.endpoint].pending < 3:
        await asyncio.sleep(0.01)
    assert "on their way" in await fails(push, child.endpoint, big), "bounded in bytes"
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, EncoderError) for outcome in outcomes), outcomes
    assert push.num_peers == 0


async def test_a_receiver_that_dies_with_a_message_on_its_way(make: Make, start: Callable[[str], Child]) -> None:
    child = start(PULLER)
    push = make(timeout_s=1000.0)
    await stopped(push, child)
    lost = asyncio.create_task(fails(push, child.endpoint, parcel(rows=1024, dim=8192)))
    while not push._peers[child.endpoint].pending:
        await asyncio.sleep(0.01)
    child.kill()
    assert "closed the connection" in await lost
    # Somebody else has the port now: what was lost is not sent to them.
    with Receiver(port=child.endpoint.port) as stranger:
        assert await stranger.nothing_more(200)
        await push.deliver(parcel(fill=7), child.endpoint)
        assert (await stranger.message()).rows == bytes([7]) * 32


async def test_a_receiver_that_asks_whether_we_live_is_answered(make: Make) -> None:
    push = make()
    context = zmq.asyncio.Context()
    pull = context.socket(zmq.PULL)
    pull.setsockopt(zmq.HEARTBEAT_IVL, 50)
    pull.setsockopt(zmq.HEARTBEAT_TIMEOUT, 200)
    endpoint = PushEndpoint("127.0.0.1", pull.bind_to_random_port("tcp://127.0.0.1"))
    try:
        await push.deliver(parcel(), endpoint)
        await pull.recv_multipart()
        (peer,) = push._peers.values()
        await asyncio.sleep(1.0)
        assert not peer.is_lost
        await push.deliver(parcel(fill=2), endpoint)
        assert bytes((await pull.recv_multipart())[1])[:1] == b"\2"
        assert list(push._peers.values()) == [peer], "the connection has held"
    finally:
        context.destroy(linger=0)


async def test_a_message_that_has_begun_is_finished_though_its_caller_has_gone(
    make: Make, start: Callable[[str], Child]
) -> None:
    """Half a message would be the end of the connection."""
    child = start(PULLER)
    push = make(timeout_s=20.0)
    await stopped(push, child)
    gone, later = (asyncio.create_task(push.deliver(parcel(1024, 8192), child.endpoint)) for _ in range(2))
    peer = push._peers[child.endpoint]
    while peer.pending < 2:
        await asyncio.sleep(0.01)
    for task in (gone, later):
        task.cancel()
    await asyncio.gather(gone, later, return_exceptions=True)
    assert peer.pending == 1, "the second is taken back"
    os.kill(child.process.pid, signal.SIGCONT)
    while peer.pending:
        assert not peer.is_lost
        await asyncio.sleep(0.01)


async def test_what_was_sent_arrives_after_the_end_whatever_comes_meanwhile(make: Make, slow: SlowPuller) -> None:
    push = make()
    with await sent_to(slow, push, BIG) as sock:
        closing = asyncio.create_task(push.close())
        while push.num_peers:
            await asyncio.sleep(0)
        sock.sendall(PING)  # a closed connection would be answered by a reset, which takes the rest away
        await asyncio.sleep(0.05)
        assert await asyncio.to_thread(taken, sock) == wire_bytes(BIG)
    await closing


async def test_a_later_message_that_is_given_up_takes_none_before_it_away(make: Make, slow: SlowPuller) -> None:
    push = make(timeout_s=0.5)
    with await sent_to(slow, push, BIG) as sock:
        assert "took nothing" in await fails(push, slow.endpoint, parcel(rows=1024, dim=16384))
        assert push.num_peers == 0
        got = await asyncio.to_thread(taken, sock)
    assert got.startswith(wire_bytes(BIG))
    assert len(got) < len(wire_bytes(BIG)) + 60 * MIB, "the other is not whole"


async def test_a_connection_is_not_let_go_of_before_its_receiver_has_all(make: Make, slow: SlowPuller) -> None:
    push = make(max_peers=1, idle_s=0.05)
    with await sent_to(slow, push, BIG) as sock, Receiver() as other:
        waiting = asyncio.create_task(push.deliver(parcel(), to(other)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert list(push._peers) == [slow.endpoint]
        assert await asyncio.to_thread(taken, sock, len(wire_bytes(BIG))) == wire_bytes(BIG)
        await waiting
        assert (await other.message()).values().shape == (2, 4)


async def test_a_message_that_has_begun_without_a_caller_does_not_stay_for_ever(make: Make, slow: SlowPuller) -> None:
    push = make(timeout_s=0.5)
    with await sent_to(slow, push, BIG):
        task = asyncio.create_task(push.deliver(parcel(rows=1024, dim=16384), slow.endpoint))
        while not push._peers[slow.endpoint].pending:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while push.num_peers:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("rows", [256, 16384])
async def test_a_place_is_taken_from_a_receiver_that_stands_still(make: Make, slow: SlowPuller, rows: int) -> None:
    """Whether all of its message is in the kernel or a part is still here."""
    push = make(max_peers=1, still_s=0.3)
    big = parcel(rows, 1024)
    stuck = asyncio.create_task(push.deliver(big, slow.endpoint))
    with await asyncio.to_thread(slow.shake_hands) as sock, Receiver() as other:
        await push.deliver(parcel(), to(other))
        assert (await other.message()).values().shape == (2, 4)
        (outcome,) = await asyncio.gather(stuck, return_exceptions=True)
        got = await asyncio.to_thread(taken, sock)
    if outcome is None:
        assert got == wire_bytes(big)
    else:
        assert "its place was needed" in str(outcome)
        assert wire_bytes(big).startswith(got)


async def test_many_that_wait_for_a_place_look_for_one_no_oftener_than_one_does(
    make: Make, slow: SlowPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, looks = make(max_peers=1), 0

    def counted(fd: int, request: int, room: bytes) -> bytes:
        nonlocal looks
        looks += 1
        return ioctl(fd, request, room)

    with await sent_to(slow, push, BIG) as sock, Receiver() as other:
        ioctl = fcntl.ioctl
        monkeypatch.setattr(fcntl, "ioctl", counted)
        waiting = [asyncio.create_task(push.deliver(parcel(), to(other))) for _ in range(300)]
        await asyncio.sleep(0.5)
        assert 0 < looks < len(waiting)
        monkeypatch.undo()
        await asyncio.to_thread(taken, sock, len(wire_bytes(BIG)))
        await asyncio.gather(*waiting)


async def test_a_receiver_that_talks_without_end_is_not_listened_to(make: Make, slow: SlowPuller) -> None:
    push = make()
    with await sent_to(slow, push, parcel()) as sock:
        (peer,) = push._peers.values()
        sock.sendall(PING * 1000)
        await asyncio.sleep(0.1)
        assert not peer.is_lost
        sent = await asyncio.to_thread(zmtp.flood, sock, 64 * MIB, PING * 1000)
        assert sent < 64 * MIB
        assert push.num_peers == 0


async def test_what_was_not_sent_is_let_go_of_with_its_connection(make: Make, slow: SlowPuller) -> None:
    """Though its caller's patience is not over."""

    class Rows(bytearray):
        """Can be watched."""

    push = make(timeout_s=1000.0)
    rows = Rows(64 * MIB)
    watch = weakref.ref(rows)
    whole = Parcel(header=parcel(rows=1024, dim=16384).header, chunks=(memoryview(rows),))
    gone = asyncio.create_task(push.deliver(whole, slow.endpoint))
    with await asyncio.to_thread(slow.shake_hands) as sock:
        await asyncio.to_thread(taken, sock, MIB)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    del rows, whole, gone
    while push.num_peers:
        await asyncio.sleep(0.01)
    gc.collect()
    assert watch() is None
