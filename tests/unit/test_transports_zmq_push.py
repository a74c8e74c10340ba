"""Pushing to real PULL sockets that take what comes: messages, names, connections and their places, turns."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from spmd_encoder.transports.base import Parcel, ParcelError, PushEndpoint
from spmd_encoder.transports.push_turns import TURN_BYTES, Turns
from spmd_encoder.transports.zmq_push import ZmqPush
from tests.harness.pushes import FRAMING, MIB, Make, fails, failure, parcel, pushes, to
from tests.harness.sglang_receiver import Receiver

pytestmark = pytest.mark.timeout(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with pushes() as new:
        yield new


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


async def test_the_addresses_of_a_name_are_tried_in_turn(make: Make) -> None:
    with Receiver() as receiver:

        async def both(_: object) -> list[object]:
            tcp = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [
                (socket.AF_INET6, *tcp, ("::1", receiver.port, 0, 0)),
                (socket.AF_INET, *tcp, ("127.0.0.1", receiver.port)),
            ]

        push = make(run_look_ups=both)
        await push.deliver(parcel(), PushEndpoint("receiver.invalid", receiver.port))
        assert (await receiver.message()).values().shape == (2, 4)
    assert "name of a host" in await fails(push, PushEndpoint("a..b", receiver.port)) or push.num_peers == 0


async def test_a_small_parcel_may_have_a_long_description(make: Make) -> None:
    push = make()
    long = replace(failure(), error=ParcelError(status=503, message="x" * 300_000))
    with Receiver() as receiver:
        await push.deliver(parcel(), to(receiver))  # now there is a connection, which takes what is small at once
        await receiver.message()
        await push.deliver(long, to(receiver))
        assert (await receiver.message()).head.error_msg == "x" * 300_000


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
