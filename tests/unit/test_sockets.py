"""The typed ZMQ sockets: frames of any size arrive, a stranger's hold no memory, and none gets past the handshake."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.messages import Cancel, Failed, FromScheduler, Heartbeat, SchedulerStats, ToScheduler
from spmd_encoder.wire.sockets import PIECE_BYTES, Context, DealerSocket, RouterSocket, new_context
from tests.harness import zmtp

pytestmark = pytest.mark.timeout(60)

BEAT = Heartbeat(stats=SchedulerStats())
SECRET = "of this world"


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp"])
async def router(request: pytest.FixtureRequest, context: Context, tmp_path: Path) -> AsyncIterator[RouterSocket[Any]]:
    path = tmp_path / "work" if request.param == "ipc" else None
    router: RouterSocket[Any] = RouterSocket(
        context, FromScheduler, secret=SECRET, path=path, host="" if path else "127.0.0.1"
    )
    yield router
    router.close()


def dealer(context: Context, router: RouterSocket[Any], secret: str = SECRET) -> DealerSocket[Any]:
    return DealerSocket(context, ToScheduler, secret=secret, name=b"d", address=router.address)


def knock(router: RouterSocket[Any]) -> socket.socket:
    """A plain connection to where it listens."""
    kind, _, place = router.address.partition("://")
    sock = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    sock.settimeout(30)
    host, _, port = place.rpartition(":")
    sock.connect(place if kind == "ipc" else (host, int(port)))
    return sock


async def receive(router: RouterSocket[Any]) -> tuple[bytes, Any, list[memoryview]]:
    return await asyncio.wait_for(router.receive(), 10)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
async def test_a_frame_of_any_size_arrives_whole(context: Context, router: RouterSocket[Any], size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    peer = dealer(context, router)
    peer.send(BEAT, [memoryview(data)])
    peer.send(BEAT)
    assert [[bytes(frame) for frame in (await receive(router))[2]] for _ in range(2)] == [[data], []]


async def test_the_other_way_frames_stay_as_they_are(context: Context, router: RouterSocket[Any]) -> None:
    peer = dealer(context, router)
    peer.send(BEAT)
    name, _, _ = await receive(router)
    frames = [b"a", b"", bytes(2 * PIECE_BYTES)]
    router.send(name, Failed(job_id=1, code="INTERNAL", message=""), frames)  # type: ignore[arg-type]
    with pytest.raises(WireError):  # of the other direction
        await asyncio.wait_for(peer.receive(), 30)
    peer.close()


@pytest.mark.parametrize("flags", [0, zmtp.COMMAND], ids=["message", "command"])
@pytest.mark.parametrize("after", [b"", zmtp.plain_hello(b"member", b"wrong")], ids=["at once", "after a wrong secret"])
async def test_a_strangers_frame_holds_no_memory(
    context: Context, router: RouterSocket[Any], flags: int, after: bytes
) -> None:
    before = psutil.Process().memory_info().rss
    with knock(router) as sock:
        sock.sendall(zmtp.greeting() + after + zmtp.head(2**34, flags))
        sent = await asyncio.to_thread(zmtp.flood, sock, 200 * 2**20)
        assert sent < 200 * 2**20, "it is hung up on"
    assert psutil.Process().memory_info().rss - before < 8 * PIECE_BYTES
    peer = dealer(context, router)
    peer.send(BEAT)
    assert (await receive(router))[1] == BEAT


@pytest.mark.parametrize(
    "hello",
    [
        zmtp.greeting(b"NULL") + zmtp.ready(b"READY", b"DEALER"),
        zmtp.greeting() + zmtp.ready(b"READY", b"DEALER"),
        zmtp.greeting() + zmtp.ready(b"INITIATE", b"DEALER"),
        zmtp.greeting() + zmtp.plain_hello(b"member", b"") + zmtp.ready(b"INITIATE", b"DEALER"),
        zmtp.greeting() + zmtp.plain_hello(b"", SECRET.encode()) + zmtp.ready(b"INITIATE", b"DEALER"),
        b"\x01\x00",  # ZMTP 1.0, which knows no secrets
        b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",  # ZMTP 2.0
    ],
)
async def test_nobody_is_heard_without_the_secret(context: Context, router: RouterSocket[Any], hello: bytes) -> None:
    with knock(router) as sock:
        sock.sendall(hello + zmtp.frame(b"\x81\xa4type\xa9Heartbeat") * 3)
        peer = dealer(context, router)
        peer.send(BEAT)
        name, message, _ = await receive(router)
        assert (name, message) == (b"d", BEAT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.receive(), 0.1)
    stranger = dealer(context, router, "another")
    stranger.send(BEAT)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(router.receive(), 0.2)


async def test_a_listener_is_given_all_that_comes_in_order_and_may_answer(
    context: Context, router: RouterSocket[Any]
) -> None:
    peer, taken = dealer(context, router), asyncio.Queue[Any]()
    peer.send(BEAT)
    name, _, _ = await receive(router)

    def take(message: Any, frames: list[memoryview]) -> None:
        taken.put_nowait((message, [bytes(frame) for frame in frames]))
        peer.send(BEAT)

    router.send(name, Cancel(job_ids=(0,)))  # before anybody listens
    listening = asyncio.create_task(peer.listen(take))
    for number in range(1, 100):
        router.send(name, Cancel(job_ids=(number,)), [b"a", b"%d" % number] if number % 2 else [])
    router.send(name, Failed(job_id=1, code="INTERNAL", message=""))  # type: ignore[arg-type]  # it is dropped
    router.send(name, Cancel(job_ids=(100,)))
    for number in range(101):
        frames = [b"a", b"%d" % number] if number % 2 else []
        assert await asyncio.wait_for(taken.get(), 10) == (Cancel(job_ids=(number,)), frames)
        assert (await receive(router))[1] == BEAT
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    peer.close()


async def test_what_a_listener_raises_ends_it(context: Context, router: RouterSocket[Any]) -> None:
    peer, seen = dealer(context, router), list[Any]()
    peer.send(BEAT)
    name, _, _ = await receive(router)

    def take(message: Any, frames: list[memoryview]) -> None:
        seen.append(message)
        raise RuntimeError("out of step")

    for number in range(3):
        router.send(name, Cancel(job_ids=(number,)))
    with pytest.raises(RuntimeError, match="out of step"):
        await asyncio.wait_for(peer.listen(take), 10)
    assert seen == [Cancel(job_ids=(0,))]
    assert (await asyncio.wait_for(peer.receive(), 10))[0] == Cancel(job_ids=(1,))
    peer.close()
