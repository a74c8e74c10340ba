"""Strangers at both ends of a push: receivers that are none, and senders that are none, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import PushEndpoint
from spmd_encoder.transports.item_frames import item_frames
from spmd_encoder.transports.push_peer import PushPeer
from spmd_encoder.transports.push_turns import Farewells, Turns
from spmd_encoder.transports.zmq_push import ZmqPush
from tests.harness import zmtp
from tests.harness.examples import examples, within
from tests.harness.noise import MARK, noise
from tests.harness.parcels import failed_item, item

pytestmark = within(120)

EXAMPLES = examples(40, database=None, suppress_health_check=list(HealthCheck))
FLOOD_BYTES = 200 * 2**20
GROWTH_BYTES = 40 * 2**20
HELD_BYTES = 32 * 2**20
"""What the kernel's buffers may take of a flood that nobody reads."""
NULL = zmtp.greeting(b"NULL")
FRAMES = [bytes(frame) for parcel in (item(), failed_item()) for frame in item_frames(parcel)]


@pytest.fixture
def receiver() -> Iterator[EmbeddingReceiver]:
    with EmbeddingReceiver(max_bytes=2**20) as receiver:
        yield receiver


def good_path(receiver: EmbeddingReceiver) -> None:
    """It still gets what a server sends, behind whatever a stranger has sent."""

    async def deliver() -> None:
        push = ZmqPush(item_frames, timeout_s=10.0, max_peer_bytes=2**30)
        await push.deliver(item(index=5), PushEndpoint.parse(receiver.endpoint))
        await push.close()

    asyncio.run(deliver())
    while receiver.receive(timeout_s=30).header.index != 5:
        pass


def knock(receiver: EmbeddingReceiver) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(receiver.endpoint.rpartition(":")[2])), timeout=30)


@pytest.mark.hypothesis
@pytest.mark.parametrize("greeted", [b"", NULL + zmtp.ready(b"READY", b"PUSH")], ids=["at once", "after a handshake"])
def test_noise_to_a_receiver(receiver: EmbeddingReceiver, greeted: bytes, caplog: pytest.LogCaptureFixture) -> None:
    valid = [NULL, zmtp.frame(FRAMES[0], zmtp.MORE) + zmtp.frame(FRAMES[1]), zmtp.frame(MARK)]

    @EXAMPLES
    @given(noise(valid), st.integers(0, 100))
    def check(data: bytes, cut: int) -> None:
        with knock(receiver) as sock, contextlib.suppress(OSError):
            sock.sendall(greeted + data[:cut])
            sock.sendall(data[cut:])

    check()
    good_path(receiver)
    assert MARK.decode() not in caplog.text


@pytest.mark.hypothesis
def test_messages_to_a_receiver_that_are_none_of_ours(
    receiver: EmbeddingReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(receiver.endpoint)

        @EXAMPLES
        @given(st.lists(noise([*FRAMES, MARK]), min_size=1, max_size=4))
        def check(frames: list[bytes]) -> None:
            push.send_multipart(frames)

        check()
        good_path(receiver)
        with contextlib.suppress(TimeoutError):
            while True:
                receiver.receive(timeout_s=0.5)
    assert receiver.num_rejected > 10
    assert MARK.decode() not in caplog.text
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) < 10


@pytest.mark.parametrize("flags", [0, zmtp.COMMAND])
@pytest.mark.parametrize("greeted", [NULL, NULL + zmtp.ready(b"READY", b"PUSH")], ids=["greeting", "handshake"])
def test_an_endless_frame_to_a_receiver(receiver: EmbeddingReceiver, greeted: bytes, flags: int) -> None:
    before = psutil.Process().memory_info().rss
    with knock(receiver) as sock:
        sock.sendall(greeted + zmtp.head(2**34, flags))
        assert zmtp.flood(sock, FLOOD_BYTES) < FLOOD_BYTES
    assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
    good_path(receiver)


def test_many_silent_senders(receiver: EmbeddingReceiver) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(200):
            stack.enter_context(knock(receiver)).sendall(NULL[: number % 64])
        good_path(receiver)


# -- receivers that are none


def greets_and_floods(sock: socket.socket) -> None:
    sock.sendall(NULL + zmtp.head(2**34, zmtp.COMMAND))
    assert zmtp.flood(sock, FLOOD_BYTES) < HELD_BYTES


def shakes_hands_and_floods(sock: socket.socket) -> None:
    sock.sendall(NULL + zmtp.ready(b"READY", b"PULL") + zmtp.head(2**34, zmtp.COMMAND))
    assert zmtp.flood(sock, FLOOD_BYTES) < HELD_BYTES


def shakes_hands_and_talks(sock: socket.socket) -> None:
    sock.sendall(NULL + zmtp.ready(b"READY", b"PULL") + zmtp.head(2**34))
    assert zmtp.flood(sock, FLOOD_BYTES) < HELD_BYTES


def is_another_kind_of_socket(sock: socket.socket) -> None:
    sock.sendall(NULL + zmtp.ready(b"READY", b"PUB"))


def says_noise(sock: socket.socket) -> None:
    sock.sendall(MARK * 1000)


@pytest.mark.parametrize(
    "behave",
    [greets_and_floods, shakes_hands_and_floods, shakes_hands_and_talks, is_another_kind_of_socket, says_noise],
)
def test_a_hostile_receiver_is_an_error_and_fills_nobody(
    receiver: EmbeddingReceiver, behave: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(5)
                try:
                    behave(sock)
                    while sock.recv(2**16):
                        pass
                except OSError:
                    pass
                except AssertionError as failure:
                    failures.append(failure)

        thread = threading.Thread(target=serve)
        thread.start()
        before = psutil.Process().memory_info().rss
        asyncio.run(deliver_to_both(listener.getsockname()[1], receiver))
        thread.join(20)
        assert not thread.is_alive()
    assert not failures
    assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
    assert receiver.receive(timeout_s=30).header.index == 1
    assert MARK.decode() not in caplog.text


async def deliver_to_both(port: int, receiver: EmbeddingReceiver) -> None:
    """The hostile one may have taken it before it showed what it is."""
    push = ZmqPush(item_frames, timeout_s=5.0, max_peer_bytes=2**30)
    try:
        for _ in range(3):
            try:
                await push.deliver(item(), PushEndpoint("127.0.0.1", port))
            except EncoderError as error:
                assert error.code is ErrorCode.DELIVERY_FAILED
                break
            await asyncio.sleep(0.5)
        await push.deliver(item(index=1), PushEndpoint.parse(receiver.endpoint))
    finally:
        await push.close()


async def test_a_receiver_that_says_much_keeps_the_loop_from_nobody() -> None:
    """What it says is valid, nearly as much as it may say at once, and is read in several turns of the loop."""
    flood = NULL + zmtp.ready(b"READY", b"PULL") + zmtp.frame(b"\4PING\0\0", zmtp.COMMAND) * 1_600
    lost = asyncio.Event()
    turns = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = PushEndpoint("127.0.0.1", listener.getsockname()[1])
        peer = PushPeer(endpoint, Turns(), Farewells(1), lambda _: lost.set(), asyncio.to_thread, patience_s=10.0)
        sock, _ = await asyncio.to_thread(listener.accept)
        with sock:
            sock.sendall(flood + zmtp.frame(b"\4NONE", zmtp.COMMAND))
            while not lost.is_set():
                turns += 1
                await asyncio.sleep(0)
    assert peer.is_lost
    assert turns > len(flood) // 2**12
