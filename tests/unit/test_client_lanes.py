"""A client's connections: what each costs beside others, when they are closed, and who has them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from spmd_encoder.client import AsyncClient
from spmd_encoder.client.lanes import AsyncLanes, Lanes
from spmd_encoder.client.transport import tls_of
from tests.harness.small_server import Small, answered, small

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_request_costs_the_same_whatever_number_of_connections_idles(kind: str) -> None:
    """In calls of functions: a pool that looks at all of its connections makes a burst cost their square."""

    async def rule(server: Small, name: str) -> str:
        if name.startswith("together"):
            await server.until(lambda: len(server.names) >= int(name.partition(" ")[2]))
        return "ok"

    async def calls_of_one(idle: int) -> int:
        async with small(rule) as server:
            if kind == "async":
                lanes = AsyncLanes(tls_of(False))
                async with httpx.AsyncClient(transport=lanes, base_url=server.url) as http:
                    await asyncio.gather(*(http.post("/", content=f"together {idle}") for _ in range(idle)))
                    with counted_calls() as calls:
                        await http.post("/", content="alone")
            else:

                def run() -> list[int]:
                    with (
                        httpx.Client(transport=Lanes(tls_of(False)), base_url=server.url) as http,
                        ThreadPoolExecutor(idle) as pool,
                    ):
                        list(pool.map(lambda _: http.post("/", content=f"together {idle}"), range(idle)))
                        with counted_calls() as calls:
                            http.post("/", content="alone")
                    return calls

                calls = await asyncio.to_thread(run)
            assert server.connections == idle
        return calls[0]

    few, many = asyncio.run(calls_of_one(4)), asyncio.run(calls_of_one(64))
    assert many < 1.5 * few


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Of Python's functions, by this thread in the block."""
    calls = [0]

    def count(_frame: object, event: str, _arg: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def test_connections_that_are_not_needed_are_closed() -> None:
    async def rule(server: Small, name: str) -> str:
        if name == "together":
            await server.until(lambda: server.names.count("together") == 10)
        return "ok"

    async with small(rule) as server:
        lanes = AsyncLanes(tls_of(False), idle_s=-1.0)
        async with httpx.AsyncClient(transport=lanes, base_url=server.url) as http:
            await asyncio.gather(*(http.post("/", content="together") for _ in range(10)))
            assert server.connections == 10
            await server.until(lambda: server.open == 0)
            assert (await http.post("/", content="alone")).status_code == 422
        await server.until(lambda: server.open == 0)


async def test_closing_the_client_closes_all_connections() -> None:
    async def rule(server: Small, name: str) -> str:
        await server.until(lambda: len(server.names) >= 5)
        return "ok"

    async with small(rule) as server:
        async with AsyncClient(server.url) as client:
            await asyncio.gather(*(answered(client, "x") for _ in range(5)))
            assert (server.connections, server.open) == (5, 5)
        await server.until(lambda: server.open == 0)


async def test_a_request_that_was_cancelled_leaves_its_connection_to_nobody() -> None:
    async def rule(server: Small, name: str) -> str:
        if name == "held":
            await asyncio.Event().wait()
        return "ok"

    async with small(rule) as server, AsyncClient(server.url) as client:
        for number in range(20):
            held = asyncio.create_task(answered(client, "held"))
            await server.until(lambda count=number + 1: server.names.count("held") == count)
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            assert await answered(client, f"after {number}") == f"after {number}"
        assert server.connections <= 40
