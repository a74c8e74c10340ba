"""The process that writes into receivers' memory: real ones, around a stand-in for Mooncake's engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.starter import SpawnStarter
from spmd_encoder.transports.memory_writer import MAX_SESSION_WRITES, MemoryWriter, WriteError
from spmd_encoder.wire.messages import WriterSpec
from tests.harness.landing import FAKE_MOONCAKE, Landing

pytestmark = pytest.mark.timeout(60)


def spec(device: str = "") -> WriterSpec:
    return WriterSpec(host="127.0.0.1", protocol="tcp", device=device)


@pytest.fixture
async def writer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryWriter]:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_MOONCAKE))
    writer = MemoryWriter(SpawnStarter(), spec())
    yield writer
    await writer.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def begun(landing: Landing) -> None:
    await until(lambda: landing.engine.begun.acquire(blocking=False))


def write(writer: MemoryWriter, landing: Landing, data: bytes = b"x" * 100) -> asyncio.Task[None]:
    return asyncio.create_task(writer.write([data], len(data), landing.session, landing.address))


async def test_chunks_land_one_after_another(writer: MemoryWriter) -> None:
    big = os.urandom(3 * 2**20 + 7)
    with Landing(2**22) as landing:
        await writer.write([b"ab", memoryview(b"cd"), big], 4 + len(big), landing.session, landing.address)
        assert bytes(landing.buffer[: 4 + len(big)]) == b"abcd" + big
        assert not landing.buffer[4 + len(big) :].any()


async def test_writes_to_several_receivers_and_to_one(writer: MemoryWriter) -> None:
    with Landing() as one, Landing() as other:
        calls = [
            writer.write([bytes([n])] * 8, 8, landing.session, landing.address + 8 * n)
            for landing in (one, other)
            for n in range(20)
        ]
        await asyncio.gather(*calls)
        for landing in (one, other):
            assert landing.buffer[:160].reshape(20, 8).tolist() == [[n] * 8 for n in range(20)]


async def test_memory_that_is_not_registered_is_refused_and_nobody_else_suffers(writer: MemoryWriter) -> None:
    with Landing(64) as landing:
        with pytest.raises(WriteError, match="could not write"):
            await writer.write([b"x" * 65], 65, landing.session, landing.address)
        assert not landing.buffer.any()
        await write(writer, landing, b"y" * 64)
        assert bytes(landing.buffer) == b"y" * 64


async def test_a_receiver_that_is_gone_is_told_of(writer: MemoryWriter) -> None:
    with Landing() as gone:
        pass
    with pytest.raises(WriteError, match="nobody answers there"):
        await write(writer, gone)
    pid = writer.pid
    with Landing() as alive:
        await write(writer, alive)
    assert writer.pid == pid, "no reason to replace the process"


async def test_a_death_costs_the_writes_under_way_and_nothing_else(writer: MemoryWriter) -> None:
    with Landing() as slow, Landing() as landing:
        slow.engine.gate.clear()
        lost = write(writer, slow)
        await begun(slow)
        first = writer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(WriteError, match="ended with code -9"):
            await lost
        # Whoever comes meanwhile waits for the next process.
        await write(writer, landing, b"z" * 100)
        assert bytes(landing.buffer[:100]) == b"z" * 100
        assert writer.pid not in {None, first}


async def test_who_runs_out_of_time_ends_the_write(writer: MemoryWriter) -> None:
    with Landing() as slow:
        slow.engine.gate.clear()
        call = write(writer, slow)
        await begun(slow)
        first = writer.pid
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert first is not None and not psutil.pid_exists(first), "it could write into memory that was given up"


async def test_a_receiver_that_does_not_answer_holds_nobody_up_and_costs_no_process(writer: MemoryWriter) -> None:
    with Landing() as silent, Landing() as landing:
        silent.engine.open_for_probes.clear()
        await writer.start()
        first = writer.pid
        waiting = [write(writer, silent) for _ in range(2 * MAX_SESSION_WRITES)]
        await asyncio.sleep(0)
        await write(writer, landing)
        for call in waiting:
            call.cancel()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await write(writer, landing)
        assert writer.pid == first


async def test_one_receiver_has_its_share(writer: MemoryWriter) -> None:
    with Landing() as slow, Landing() as landing:
        slow.engine.gate.clear()
        stuck = [write(writer, slow) for _ in range(3 * MAX_SESSION_WRITES)]
        for _ in range(MAX_SESSION_WRITES):
            await begun(slow)
        await asyncio.wait_for(write(writer, landing), 20)
        assert not slow.engine.begun.acquire(blocking=False)
        slow.engine.gate.set()
        await asyncio.gather(*stuck)
        assert slow.engine.num_writes == 3 * MAX_SESSION_WRITES


async def test_a_failed_write_is_followed_by_a_fresh_engine(writer: MemoryWriter) -> None:
    with Landing(64) as landing:
        await write(writer, landing, b"a")
        first = writer.pid
        with pytest.raises(WriteError):
            await writer.write([b"x"], 1, landing.session, landing.address + 64)
        await write(writer, landing, b"b")
        assert writer.pid != first


async def test_without_mooncake_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    writer = MemoryWriter(SpawnStarter(), spec())
    with pytest.raises(StartupError) as caught:
        await writer.start()
    assert caught.value.exit_code == 2
    for words in ("--encoder-transfer-backend mooncake", "No module named 'mooncake'", "[mooncake]", "libibverbs1"):
        assert words in caught.value.message
    with pytest.raises(WriteError, match="mooncake"):
        await writer.write([b"x"], 1, "127.0.0.1:1", 1)
    await writer.close()


@pytest.mark.parametrize(("device", "why"), [("broken", "code -1"), ("fatal", "ended with code -6")])
async def test_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch, device: str, why: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_MOONCAKE))
    writer = MemoryWriter(SpawnStarter(), spec(device))
    with pytest.raises(StartupError, match=why) as caught:
        await writer.start()
    assert caught.value.exit_code == 1
    await writer.close()


async def test_closing_ends_the_process_and_what_it_does(writer: MemoryWriter) -> None:
    with Landing() as slow:
        slow.engine.gate.clear()
        stuck = [write(writer, slow) for _ in range(2 * MAX_SESSION_WRITES)]
        await begun(slow)
        pid = writer.pid
        await writer.close()
        await writer.close()
        ends = await asyncio.gather(*stuck, return_exceptions=True)
        assert all(isinstance(end, WriteError) for end in ends), ends
        assert pid is not None and not psutil.pid_exists(pid)
        with pytest.raises(WriteError, match="ending"):
            await write(writer, slow)
