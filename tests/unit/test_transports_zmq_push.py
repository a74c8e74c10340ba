"""Pushing to real PULL sockets: good, slow, stopped, vanished and strange ones."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import zmq
import zmq.asyncio

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import Parcel, ParcelError, ParcelHeader, PushEndpoint
from spmd_encoder.transports.push_turns import TURN_BYTES, Turns
from spmd_encoder.transports.sglang_frames import ClassPath, SglangFraming
from spmd_encoder.transports.zmq_push import ZmqPush
from spmd_encoder.transports.zmtp import HELLO, message
from tests.harness import zmtp
from tests.harness.sglang_receiver import CURRENT, Receiver

pytestmark = pytest.mark.timeout(30)

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


PULLER = """
import time, zmq
pull = zmq.Context().socket(zmq.PULL)
pull.setsockopt(zmq.RCVHWM, 1)
print(pull.bind_to_random_port("tcp://127.0.0.1"), flush=True)
pull.recv_multipart()
print("got", flush=True)
time.sleep(1000)
"""


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


@pytest.fixture
def start() -> Iterator[Callable[[str], Child]]:
    children: list[Child] = []

    def new(code: str) -> Child:
        children.append(Child(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)))
        return children[-1]

    yield new
    for child in children:
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Make = Callable[..., ZmqPush]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[ZmqPush] = []

    def new(**settings: float) -> ZmqPush:
        options: dict[str, float] = {"timeout_s": 10.0, "max_peer_bytes": 64 * MIB, **settings}
        made.append(ZmqPush(FRAMING, **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for push in made:
        await push.close()


async def fails(push: ZmqPush, endpoint: PushEndpoint, sent: Parcel | None = None) -> str:
    with pytest.raises(EncoderError) as caught:
        await push.deliver(sent or parcel(), endpoint)
    assert caught.value.code is ErrorCode.DELIVERY_FAILED
    assert str(endpoint) in caught.value.message
    return caught.value.message


async def test_rows_and_errors_arrive_in_order(make: Make) -> None:
    push = make()
    with Receiver() as receiver:
        for index in range(5):
            await push.deliver(parcel(fill=index, part_id=f"p{index}"), to(receiver))
        await push.deliver(failure("p5"), to(receiver))
        got = [await receiver.message() for _ in range(6)]
    assert [message.head.req_id for message in got] == [f"p{index}" for index in range(6)]
    assert [message.rows for message in got[:5]] == [bytes([index]) * 32 for index in range(5)]
    assert (got[5].head.error_msg, got[5].head.error_code, got[5].rows) == ("full", 503, None)
    assert push.num_peers == 1


async def test_ipv6_and_names(make: Make) -> None:
    push = make()
    with Receiver(host="::1") as six, Receiver() as four:
        await push.deliver(parcel(), to(six))
        await push.deliver(parcel(), PushEndpoint("localhost", four.port))
        assert (await six.message()).values().shape == (2, 4)
        assert (await four.message()).values().shape == (2, 4)


async def test_a_large_frame_is_let_go_of(make: Make) -> None:
    class Rows(bytearray):
        """Can be watched."""

    push = make()
    rows = Rows(32 * MIB)
    watch = weakref.ref(rows)
    whole = Parcel(header=parcel(rows=1024, dim=8192).header, chunks=(memoryview(rows),))
    with Receiver() as receiver:
        await push.deliver(whole, to(receiver))
        message = await receiver.message()
    assert message.rows == bytes(32 * MIB)
    del rows, whole
    gc.collect()
    assert watch() is None


async def test_a_port_where_nobody_listens_fails_at_once(make: Make) -> None:
    push = make(timeout_s=1000.0)
    assert "cannot be reached" in await fails(push, PushEndpoint("127.0.0.1", free_port()))
    assert push.num_peers == 0


async def test_a_name_that_does_not_exist(make: Make) -> None:
    assert "resolved" in await fails(make(), PushEndpoint("no-such-host.invalid", 5555))


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


async def stopped(push: ZmqPush, child: Child) -> None:
    """Stop the receiver while it is connected and has nothing to do."""
    await push.deliver(parcel(), child.endpoint)
    assert await asyncio.to_thread(child.line) == "got"
    os.kill(child.process.pid, signal.SIGSTOP)


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


async def test_a_receiver_that_closed_while_idle_is_found_again(make: Make) -> None:
    push = make()
    with Receiver() as receiver:
        await push.deliver(parcel(), to(receiver))
        await receiver.message()
        port = receiver.port
    with Receiver(port=port) as again:
        await push.deliver(parcel(fill=3), to(again))
        assert (await again.message()).rows == bytes([3]) * 32


async def test_connections_are_bounded_and_the_oldest_idle_one_goes(make: Make) -> None:
    push = make(max_peers=4)
    context = zmq.asyncio.Context()
    receivers = [Receiver(context=context) for _ in range(200)]
    try:
        await asyncio.gather(*(push.deliver(parcel(fill=i), to(r)) for i, r in enumerate(receivers)))
        assert push.num_peers <= 4
        for index, receiver in enumerate(receivers):
            assert (await receiver.message()).rows == bytes([index]) * 32
    finally:
        context.destroy(linger=0)


async def test_idle_connections_are_closed(make: Make) -> None:
    push = make(idle_s=0.1)
    with Receiver() as receiver:
        await push.deliver(parcel(), to(receiver))
        await receiver.message()
        while push.num_peers:
            await asyncio.sleep(0.02)


async def test_a_thousand_parcels_to_many_at_once(make: Make) -> None:
    push = make()
    receivers = [Receiver() for _ in range(10)]
    try:
        sends = [push.deliver(parcel(part_id=f"{n}"), to(receivers[n % 10])) for n in range(1000)]
        await asyncio.gather(*sends)
        for place, receiver in enumerate(receivers):
            ids = [(await receiver.message()).head.req_id for _ in range(100)]
            assert sorted(map(int, ids)) == list(range(place, 1000, 10))
            assert await receiver.nothing_more(1)
    finally:
        for receiver in receivers:
            receiver.close()


async def test_a_cancelled_delivery_leaves_the_connection_usable(make: Make) -> None:
    push = make()
    with Receiver() as receiver:
        task = asyncio.create_task(push.deliver(parcel(part_id="first"), to(receiver)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await push.deliver(parcel(part_id="second"), to(receiver))
        ids = [(await receiver.message()).head.req_id]
        if ids == ["first"]:
            ids.append((await receiver.message()).head.req_id)
        assert ids[-1] == "second"


async def test_close_ends_what_is_under_way(make: Make) -> None:
    push = make(timeout_s=1000.0)
    server = await asyncio.start_server(lambda *_: asyncio.sleep(1000), "127.0.0.1", 0)
    endpoint = PushEndpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    stuck = asyncio.create_task(fails(push, endpoint))
    while not push.num_peers:
        await asyncio.sleep(0)
    await push.close()
    assert "ending" in await stuck
    assert "ending" in await fails(push, endpoint)
    server.close()


async def test_a_port_that_is_none(make: Make) -> None:
    await fails(make(), PushEndpoint("127.0.0.1", 0))


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


async def test_the_addresses_of_a_name_are_tried_in_turn(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    push = make()
    with Receiver() as receiver:

        async def both(*_: object, **__: object) -> list[object]:
            tcp = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [
                (socket.AF_INET6, *tcp, ("::1", receiver.port, 0, 0)),
                (socket.AF_INET, *tcp, ("127.0.0.1", receiver.port)),
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        await push.deliver(parcel(), PushEndpoint("receiver.invalid", receiver.port))
        assert (await receiver.message()).values().shape == (2, 4)
    assert "name of a host" in await fails(push, PushEndpoint("a..b", receiver.port)) or push.num_peers == 0


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


@pytest.fixture
def slow() -> Iterator[SlowPuller]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield SlowPuller(listener)


async def sent_to(slow: SlowPuller, push: ZmqPush, big: Parcel) -> socket.socket:
    sock, _ = await asyncio.gather(asyncio.to_thread(slow.shake_hands), push.deliver(big, slow.endpoint))
    return sock


PING = zmtp.frame(b"\x04PING\0\0", zmtp.COMMAND)
BIG = parcel(rows=256, dim=1024)  # 1 MiB, of which a receiver that reads nothing has a part


def wire_bytes(big: Parcel) -> bytes:
    return b"".join(message(FRAMING(big)))


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


async def test_a_small_parcel_may_have_a_long_description(make: Make) -> None:
    push = make()
    long = replace(failure(), error=ParcelError(status=503, message="x" * 300_000))
    with Receiver() as receiver:
        await push.deliver(parcel(), to(receiver))  # now there is a connection, which takes what is small at once
        await receiver.message()
        await push.deliver(long, to(receiver))
        assert (await receiver.message()).head.error_msg == "x" * 300_000


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


async def test_time_that_is_over_before_a_connection_is_used_costs_it_nothing() -> None:
    def framing(sent: Parcel) -> Sequence[bytes | memoryview]:
        if len(sent.chunks) > 1:
            time.sleep(0.5)
        return FRAMING(sent)

    push = ZmqPush(framing, timeout_s=0.2, max_peer_bytes=64 * MIB)
    with Receiver() as receiver:
        await push.deliver(parcel(), to(receiver))
        (peer,) = push._peers.values()
        halves = replace(parcel(), chunks=(bytes(16), bytes(16)))
        assert "took nothing" in await fails(push, to(receiver), halves)
        await push.deliver(parcel(), to(receiver))
        assert list(push._peers.values()) == [peer]
    await push.close()


class Stack:
    """Something to write, without a connection."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes
        self.written: list[int] = []

    def write(self, max_bytes: int) -> int:
        self.written.append(min(max_bytes, self.left))
        self.left -= self.written[-1]
        return self.written[-1]

    def stays_in_line(self) -> bool:
        return self.left > 0


async def test_all_connections_together_write_little_in_a_turn_of_the_loop_and_each_its_share() -> None:
    turns, stacks = Turns(), [Stack(3 * MIB) for _ in range(50)]
    for stack in stacks:
        turns.ask(stack)
    done = [sum(map(sum, (stack.written for stack in stacks)))]
    while any(stack.left for stack in stacks):
        await asyncio.sleep(0)
        done.append(sum(map(sum, (stack.written for stack in stacks))))
        counts = [len(stack.written) for stack in stacks]
        assert max(counts) - min(counts) <= 2
    assert max(b - a for a, b in zip([0, *done], done, strict=False)) <= TURN_BYTES
    assert all(sum(stack.written) == 3 * MIB for stack in stacks)
