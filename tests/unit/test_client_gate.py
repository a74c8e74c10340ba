"""Many requests of one client at a server that takes few: how many are sent, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spmd_encoder.client import AsyncClient, BusyError, Client, NoReplyInTimeError, RefusedError
from spmd_encoder.client.gate import Gate, Turn
from tests.harness.fake_encoder import FakeEncoder
from tests.harness.small_server import Small, answered, small

pytestmark = pytest.mark.timeout(60)

FIRST = 64


def at_most(limit: int) -> Callable[[Small, str], Awaitable[str]]:
    async def rule(server: Small, name: str) -> str:
        if server.inside > limit:
            return "1"
        await asyncio.sleep(0.01)
        return "ok"

    return rule


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_of_a_burst_few_are_refused_and_few_connections_made(kind: str) -> None:
    burst, limit = 300, 20

    def in_threads(url: str) -> list[Any]:
        with Client(url, timeout_s=50) as client, ThreadPoolExecutor(burst) as pool:
            return list(pool.map(lambda n: client.encode([str(n).encode()], raise_on_error=False), range(burst)))

    async with small(at_most(limit)) as server:
        if kind == "async":
            async with AsyncClient(server.url, concurrency=burst, timeout_s=50) as client:
                await asyncio.gather(*(answered(client, str(number)) for number in range(burst)))
        else:
            await asyncio.to_thread(in_threads, server.url)
        assert len(set(server.names)) == burst
        assert server.refused < FIRST, "the others waited at home"
        assert server.connections < 2 * FIRST
        assert server.peak < 2 * FIRST


async def test_without_retries_nothing_is_held_back() -> None:
    """Who wants no second attempt hears at once that the server is full."""

    async def rule(server: Small, name: str) -> str:
        await server.until(lambda: len(server.names) == 2 * FIRST)
        return "1"

    async with small(rule) as server, AsyncClient(server.url, concurrency=2 * FIRST, retries=0) as client:
        outcomes = await asyncio.gather(*(answered(client, "x") for _ in range(2 * FIRST)), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BusyError}
        assert len(server.names) == 2 * FIRST


async def test_a_server_that_refuses_all_is_asked_by_one_at_a_time() -> None:
    """With the oldest first, whose turn comes again before that of any that came later."""
    crowd = 20

    async def rule(server: Small, name: str) -> str:
        if len(server.names) <= crowd:
            await server.until(lambda: len(server.names) >= crowd)  # so that all are refused together
            return "0"
        assert server.inside == 1 or server.refused > crowd + 10
        await asyncio.sleep(0.01)  # time for others, were there any
        return "0" if server.refused <= crowd + 10 else "ok"

    async with small(rule) as server, AsyncClient(server.url, concurrency=crowd) as client:
        names = [f"{number:02d}" for number in range(crowd)]
        assert await asyncio.gather(*(answered(client, name) for name in names)) == names
        probes = server.names[crowd : crowd + 10]
        assert len(set(probes)) < 3, "not each of the crowd in its turn"
        assert list(dict.fromkeys(server.names[crowd + 12 :])) == sorted(set(server.names[crowd + 12 :]))


async def test_who_gives_up_while_the_server_is_full_lets_the_next_go() -> None:
    async def rule(server: Small, name: str) -> str:
        return "30" if name == "first" else "ok"

    async with small(rule) as server, AsyncClient(server.url) as client:
        first = asyncio.create_task(answered(client, "first"))
        await server.until(lambda: server.refused == 1)
        waiting = asyncio.create_task(answered(client, "cancelled"))
        next_one = asyncio.create_task(answered(client, "next"))
        with pytest.raises(RefusedError):
            await client.info()  # what is no encode waits for none
        assert server.names == ["first", ""], "nobody goes to a server that has refused the last one"
        for task in (waiting, first):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert await next_one == "next"
        assert server.names == ["first", "", "next"]


async def test_the_deadline_holds_for_those_that_wait() -> None:
    async def rule(server: Small, name: str) -> str | None:
        if len(server.names) <= 2:
            await server.until(lambda: len(server.names) >= 2)
            return "0"
        await asyncio.Event().wait()  # the one that is asked next has no answer
        return None

    async with small(rule) as server, AsyncClient(server.url, timeout_s=3.0) as client:
        tasks = [asyncio.create_task(answered(client, name)) for name in ("first", "second")]
        await server.until(lambda: len(server.names) == 3)
        late = asyncio.create_task(answered(client, "late"))
        first, second, third = await asyncio.gather(*tasks, late, return_exceptions=True)
        kinds = {type(first), type(second)}
        # The one that waited has its refusal, unless its turn came in the last moment.
        assert NoReplyInTimeError in kinds <= {NoReplyInTimeError, BusyError}
        assert isinstance(third, NoReplyInTimeError | BusyError)
        assert server.names.count("late") <= 1


def test_a_request_that_was_never_sent_says_so() -> None:
    async def go() -> None:
        async def rule(server: Small, name: str) -> str:
            return "30"

        async with small(rule) as server, AsyncClient(server.url, timeout_s=60.0) as client:
            first = asyncio.create_task(answered(client, "first"))
            await server.until(lambda: server.refused == 1)
            async with AsyncClient(server.url, timeout_s=0.3) as hasty:
                hasty._flows = type(hasty._flows)(timeout_s=0.3, gate=client._flows.gate)
                with pytest.raises(
                    NoReplyInTimeError, match=r"not sent within 0.3 s: its turn did not come; .* had: ."
                ):
                    await answered(hasty, "never")
            assert server.names == ["first"]
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    asyncio.run(go())


async def test_look_ups_are_bounded_too() -> None:
    async def rule(server: Small, name: str) -> str:
        await asyncio.sleep(0.01)
        return "ok"

    async with small(rule) as server, AsyncClient(server.url, concurrency=3) as client:
        lookups = (client.lookup([f"picture {number}".encode()]) for number in range(30))
        await asyncio.gather(*lookups, return_exceptions=True)  # these replies are none of look-ups
        assert (len(server.names), server.peak) == (30, 3)


def test_a_forked_process_does_not_wait_for_what_its_parent_does() -> None:
    with FakeEncoder() as server, Client(server.url) as client:
        gate = client._flows.gate
        turns = [gate.turn() for _ in range(FIRST)]
        assert all(turn.ask() for turn in turns)
        assert not gate.turn().ask(), "the parent's own would wait"
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                os.write(write, b"yes" if gate.turn().ask() else b"no")
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == b"yes"


# -- the gate, without a socket


def given(turns: list[Turn]) -> list[int]:
    return [number for number, turn in enumerate(turns) if turn.is_given]


def test_who_came_first_goes_first_also_after_refusals() -> None:
    gate = Gate()
    turns = [gate.turn() for _ in range(10)]
    for turn in turns[:3]:
        turn.ask()
    for turn in turns[:3]:
        turn.end("full")  # the last of them shuts the gate
    for turn in reversed(turns[3:]):
        assert not turn.ask()
    assert not turns[1].ask() and not turns[0].ask()
    assert given(turns) == []
    turns[2].ask()
    assert given(turns) == [0]
    order = []
    while going := given(turns):
        order += going
        for number in going:
            turns[number].end(None)
    assert order == list(range(10))


def test_the_number_falls_to_what_the_server_keeps_and_grows_again() -> None:
    gate = Gate()
    turns = [gate.turn() for _ in range(500)]
    for turn in turns:
        turn.ask()
    assert len(given(turns)) == FIRST
    for turn in turns[30:FIRST]:
        turn.end("full")
    assert len(given(turns)) == 30, "what was refused makes no room"
    for turn in turns[:30]:
        turn.end(None)
    after = given(turns)
    assert 30 < len(after) < FIRST
    turns[after[0]].end("full")
    assert len(given(turns)) == len(after) - 1
    for _ in range(5):
        turns[given(turns)[0]].end(None)
    fewer = len(given(turns))
    assert 0.8 * len(after) < fewer < len(after) - 1, "a tenth less than was too many"
    for _ in range(2 * fewer):
        turns[given(turns)[0]].end(None)
    assert fewer < len(given(turns)) <= fewer + 2, "and one more in as many answers"


def test_a_server_that_takes_all_has_all_in_the_end() -> None:
    gate = Gate()
    turns = [gate.turn() for _ in range(4 * FIRST)]
    for turn in turns:
        turn.ask()
    answers = 0
    while len(going := given(turns)) < len(turns):
        turns[going[0]].end(None)
        turns[going[0]].ask()
        answers += 1
    assert answers <= len(turns)


def test_no_turn_is_lost_whatever_happens() -> None:
    for seed in range(30):
        rng, gate = random.Random(seed), Gate()
        idle: list[Turn] = []
        asked: list[Turn] = []
        for _ in range(400):
            choice = rng.random()
            if choice < 0.3:
                idle.append(gate.turn())
            elif choice < 0.6 and idle:
                turn = idle.pop(rng.randrange(len(idle)))
                turn.ask()
                asked.append(turn)
            elif going := [turn for turn in asked if turn.is_given]:
                turn = rng.choice(going)
                asked.remove(turn)
                turn.end("full" if rng.random() < 0.4 else None)
                idle.append(turn)
            if rng.random() < 0.1 and idle + asked:
                turn = rng.choice(idle + asked)
                turn.__exit__()
                (idle if turn in idle else asked).remove(turn)
        for turn in idle:
            turn.__exit__()  # whoever keeps the gate shut
        while asked:
            going = [turn for turn in asked if turn.is_given]
            assert going, "all wait and nobody goes"
            for turn in going:
                turn.end(None)
                asked.remove(turn)


def test_threads_wake_each_other() -> None:
    gate, done = Gate(), []

    def request(number: int) -> None:
        rng = random.Random(number)
        with gate.turn() as turn:
            for _ in range(5):
                event = threading.Event()
                if not turn.ask():
                    turn.wake = event.set
                    assert turn.is_given or event.wait(30)
                turn.end(refused=rng.random() < 0.5)
        done.append(number)

    with ThreadPoolExecutor(100) as pool:
        list(pool.map(request, range(300)))
    assert sorted(done) == list(range(300))


def test_a_free_port_is_no_server() -> None:
    """A server that is not there is asked by few, and they all say in the end what was wrong."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def go() -> list[Any]:
        async with AsyncClient(url, retries=1, concurrency=20) as client:
            return await asyncio.gather(*(answered(client, "x") for _ in range(20)), return_exceptions=True)

    assert all("no connection" in str(outcome) for outcome in asyncio.run(go()))
