"""SGLang's mooncake backend over a real server and a real process that writes, around a stand-in for the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import pytest

from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.server import HttpFrontEnd
from spmd_encoder.frontends.shared import Shared
from spmd_encoder.keeper.starter import SpawnStarter
from spmd_encoder.transports.memory_writer import MemoryWriter
from spmd_encoder.transports.registry import load_writer
from tests.harness.fake_service import FakeService, picture
from tests.harness.landing import FAKE_MOONCAKE, Landing
from tests.harness.sglang_server import rows_of, wanted

pytestmark = pytest.mark.timeout(60)


@dataclass
class Served:
    service: FakeService
    http: httpx.AsyncClient
    shared: Shared
    writer: MemoryWriter

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def encode(self, req_id: str = "p", *widths: int, **fields: Any) -> httpx.Response:
        body = {
            "mm_items": [picture(width) for width in widths or (3,)],
            "num_parts": 1,
            "part_idx": 0,
            "req_id": req_id,
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": None,
            **fields,
        }
        return await self.post("/encode", body)

    async def sizes(self, req_id: str = "p", part_idx: int = 0) -> httpx.Response:
        return await self.post("/scheduler_receive_meta_data", {"req_id": req_id, "part_idx": part_idx})

    async def send(self, landing: Landing, req_id: str = "p", **fields: Any) -> httpx.Response:
        return await self.post("/send", landing.body(req_id=req_id, part_idx=0, **fields))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """No rows are held any more."""
        await self.until(lambda: not self.shared.dialect.staged_bytes)


@asynccontextmanager
async def serving(**sglang: Any) -> AsyncIterator[Served]:
    default = Config()
    hosts = sglang.pop("push_allowed_hosts", ())
    config = replace(
        default,
        sglang=replace(default.sglang, encoder_transfer_backend="mooncake", **sglang),
        destinations=replace(default.destinations, push_allowed_hosts=hosts),
    )
    service = FakeService()
    service.answer = rows_of
    writer = load_writer(config, SpawnStarter(), "127.0.0.1")
    assert writer is not None
    shared = Shared.open(service, config, writer=writer)
    sock = socket.create_server(("127.0.0.1", 0))
    front_end = HttpFrontEnd(service, config, sock, shared=shared)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    task = asyncio.create_task(front_end.serve())
    async with httpx.AsyncClient(base_url=url, timeout=50, trust_env=False) as http:
        yield Served(service, http, shared, writer)
    front_end.stop(0.5)
    await task
    await shared.close()
    assert not shared.dialect.staged_bytes and not service.reserved


@pytest.fixture(autouse=True)
def fake_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_MOONCAKE))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


def good(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply: httpx.Response, status: int, *words: str) -> None:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body["status"] == "error"
    for word in words:
        assert word in body["message"]


def landed(landing: Landing, *widths: int) -> None:
    rows = wanted(*widths)
    assert landing.buffer[: rows.nbytes].tobytes() == rows.tobytes()
    assert not landing.buffer[rows.nbytes :].any()


async def test_two_ranks_fetch_a_part_each_once(served: Served) -> None:
    encode = asyncio.create_task(served.encode("p", 3, 5, encoder_idx=7, time_stats_json="x" * 5000))
    sizes = {"embedding_size": 64, "embedding_len": 8, "embedding_dim": 2}
    assert good(await served.sizes()) == {"req_id": "p", "part_idx": 0, **sizes}
    assert good(await served.sizes(part_idx=7)) == {"req_id": "p", "part_idx": 7, **sizes}, "as it was asked"
    echo = good(await encode)
    assert echo == {
        **sizes,
        "req_id": "p",
        "num_parts": 1,
        "part_idx": 0,
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": None,
        "encoder_idx": 7,
    }
    with Landing() as one, Landing() as two:
        assert good(await served.send(one, receive_count=2)) is None
        assert served.shared.dialect.staged_bytes, "the other rank has not come"
        again = await asyncio.gather(*(served.send(one, receive_count=2) for _ in range(3)))
        assert all(good(reply) is None for reply in again)
        assert good(await served.send(two, receive_count=2)) is None
        await served.idle()
        for landing in (one, two):
            landed(landing, 3, 5)
            message = await landing.messages.message()
            assert message.rows is None
            head = message.head
            assert (head.req_id, head.part_idx, head.shape, head.dtype) == ("p", 0, [8, 2], "float32")
            assert [list(grid) for grid in head.grid_dim] == [[1, 2, 6], [1, 2, 10]]
            assert head.error_msg is None
            assert await landing.messages.nothing_more()
            assert landing.engine.num_writes == 1
        with Landing() as third:
            refused(await served.send(third, receive_count=2), 400, "all 2 receivers")


async def test_parts_do_not_wait_for_one_another(served: Served) -> None:
    with Landing() as slow, Landing() as landing:
        good(await served.encode("slow"))
        slow.engine.gate.clear()
        waiting = asyncio.create_task(served.send(slow, "slow"))
        await served.until(lambda: slow.engine.begun.acquire(blocking=False))
        good(await served.encode("p", 4))
        good(await served.send(landing))
        landed(landing, 4)
        slow.engine.gate.set()
        good(await waiting)
        landed(slow, 3)


async def test_a_receiver_that_vanished_costs_its_part_only(served: Served) -> None:
    with Landing() as gone, Landing() as alive:
        good(await served.encode("lost"))
        good(await served.encode("kept", 4))
        gone.engine.close()
        refused(await served.send(gone, "lost"), 502, gone.session)
        refused(await served.send(alive, "lost", receive_count=1), 400)
        good(await served.send(alive, "kept"))
        landed(alive, 4)
        await served.idle()


async def test_other_ranks_of_a_failed_part_are_told(served: Served) -> None:
    with Landing() as gone, Landing() as alive:
        good(await served.encode())
        gone.engine.close()
        refused(await served.send(gone, receive_count=2), 502)
        refused(await served.send(alive, receive_count=2), 502, gone.session)
        assert alive.engine.num_writes == 0


async def test_a_rank_whose_message_cannot_be_delivered_fails(served: Served) -> None:
    with Landing() as landing:
        good(await served.encode())
        landing.messages.socket.close(linger=0)
        refused(await served.send(landing), 502, str(landing.messages.port))


async def test_a_killed_writer_costs_what_is_under_way(served: Served) -> None:
    with Landing() as slow, Landing() as landing:
        good(await served.encode("slow"))
        good(await served.encode("p", 4))
        slow.engine.gate.clear()
        lost = asyncio.create_task(served.send(slow, "slow"))
        await served.until(lambda: slow.engine.begun.acquire(blocking=False))
        pid = served.writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        refused(await lost, 502, "ended with code -9")
        good(await served.send(landing))
        landed(landing, 4)
        assert served.writer.pid != pid
        assert (await served.http.get("/health")).status_code == 200


async def test_a_write_that_takes_too_long_fails_and_is_over_then() -> None:
    async with serving(send_timeout_s=4.0) as served:
        with Landing() as slow:
            good(await served.encode())
            slow.engine.gate.clear()
            refused(await served.send(slow), 502, "within 4 s")
            slow.engine.gate.set()
            await served.idle()


async def test_rows_that_nobody_fetches_go_at_their_deadline() -> None:
    async with serving(send_timeout_s=1.0) as served:
        good(await served.encode())
        assert served.shared.dialect.staged_bytes
        await served.idle()
        with Landing() as landing:
            refused(await served.send(landing), 504, "no receiver")
        good(await served.encode("p", 5))  # the id may be used again


async def test_rows_wait_for_receivers_when_the_caller_of_encode_has_its_answer(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(
        served.shared.dialect._parts, "_limits", replace(served.shared.dialect._parts._limits, lonely_s=0.0)
    )
    good(await served.encode())
    await asyncio.sleep(0.6)  # two ticks
    with Landing() as landing:
        good(await served.send(landing))
        landed(landing, 3)


async def test_staged_rows_are_bounded() -> None:
    async with serving(max_staged_bytes=30) as served:
        good(await served.encode("a", 3))
        refused(await served.encode("b", 3), 503, "--max-staged-bytes")
        with Landing() as landing:
            good(await served.send(landing, "a"))
            await served.idle()
            good(await served.encode("c", 3))


async def test_an_encode_that_fails_tells_who_waits_for_sizes(served: Served) -> None:
    served.service.refusal = EncoderError(ErrorCode.MEDIA_CORRUPT, "broken")
    sizes = asyncio.create_task(served.sizes())
    refused(await served.encode(), 400, "broken")
    refused(await sizes, 400, "broken")
    with Landing() as landing:
        refused(await served.send(landing), 400, "broken")


async def test_an_older_receiver_does_not_say_how_many_they_are(served: Served) -> None:
    good(await served.encode())
    with Landing() as one, Landing() as two:
        for landing in (one, two):
            good(await served.send(landing, receive_count=None))
            landed(landing, 3)
    assert served.shared.dialect.staged_bytes, "more of them may come until --send-timeout-s"


async def test_one_receiver_has_one_buffer(served: Served) -> None:
    good(await served.encode())
    with Landing() as landing:
        good(await served.send(landing, receive_count=2))
        refused(await served.send(landing, receive_count=2, buffer_address=landing.address + 64), 400, "another buffer")
        assert landing.engine.num_writes == 1


async def test_hosts_may_be_named() -> None:
    async with serving(push_allowed_hosts=("127.0.0.1",)) as served:
        for req_id, field in (("a", {"prefill_host": "127.0.0.2"}), ("b", {"session_id": "127.0.0.2:5"})):
            good(await served.encode(req_id))
            with Landing() as landing:
                refused(await served.send(landing, req_id, **field), 502, "127.0.0.2", "--push-allowed-hosts")
                assert landing.engine.num_writes == 0


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("prefill_host", None, "prefill_host"),
        ("prefill_host", "a/b", "embedding_port"),
        ("embedding_port", None, "embedding_port"),
        ("embedding_port", 70000, "embedding_port"),
        ("session_id", "nonsense", "session_id"),
        ("session_id", "host:1:2", "session_id"),
        ("session_id", "ho st:1", "session_id"),
        ("session_id", 5, "session_id"),
        ("session_id", "host:99999", "session_id"),
        ("buffer_address", 0, "buffer_address"),
        ("buffer_address", 2**64, "buffer_address"),
        ("buffer_address", True, "buffer_address"),
        ("buffer_address", "0x10", "buffer_address"),
        ("receive_count", 0, "receive_count"),
        ("receive_count", 5000, "receive_count"),
    ],
)
async def test_words_that_mean_nothing_are_refused(served: Served, field: str, value: Any, word: str) -> None:
    good(await served.encode())
    with Landing() as landing:
        refused(await served.send(landing, **{field: value}), 400, word)
        good(await served.send(landing))


async def test_send_comes_after_encode(served: Served) -> None:
    with Landing() as landing:
        refused(await served.send(landing, "never"), 404, "/encode")
        early = asyncio.create_task(served.sizes("p"))
        await served.until(lambda: served.shared.dialect.num_parts)
        refused(await served.send(landing), 404, "/encode")
        good(await served.encode())
        good(await early)
        good(await served.send(landing))


async def test_receivers_do_not_register(served: Served) -> None:
    reply = await served.post("/scheduler_receive_url", {"req_id": "p", "receive_url": "a:1", "receive_count": 1})
    refused(reply, 400, "mooncake")


async def test_transfers_are_measured(served: Served) -> None:
    good(await served.encode())
    with Landing() as landing:
        good(await served.send(landing))
    text = (await served.http.get("/metrics")).text
    assert 'spmd_encoder_transfer_seconds_count{backend="mooncake",outcome="ok"} 1.0' in text


def test_values_are_as_the_tests_think() -> None:
    assert wanted(3, 5).nbytes == 64 and wanted(3).dtype == np.float32
