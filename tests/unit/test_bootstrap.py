"""Registering with language servers' bootstraps: real little servers that come, go, forget and refuse."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from spmd_encoder.keeper.address import advertised_url
from spmd_encoder.keeper.bootstrap import Registration
from tests.harness.fake_service import READY, STARTING
from tests.harness.web import Exchange, Web, web

pytestmark = pytest.mark.timeout(20)
URL = "http://10.0.0.5:30000"


@dataclass
class Bootstrap:
    """SGLang's bootstrap server as an encoder sees it. `urls` is what it knows."""

    urls: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    status: str = "200 OK"
    server: Web | None = None

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    async def answer(self, exchange: Exchange) -> None:
        body = await exchange._reader.readexactly(int(exchange.headers["content-length"]))
        url = json.loads(body)["url"]
        self.calls.append(exchange.head.split(" HTTP")[0])
        if self.status == "200 OK":
            {"POST": self.urls.add, "DELETE": self.urls.discard}[exchange.head.split()[0]](url)
        await exchange.reply(b"OK", self.status, "Connection: close")


@asynccontextmanager
async def bootstrap() -> AsyncIterator[Bootstrap]:
    state = Bootstrap()
    async with web(state.answer) as server:
        state.server = server
        yield state


class World:
    def __init__(self) -> None:
        self.state = READY


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def registration(world: World, *addresses: str, repeat_s: float = 1000.0) -> Registration:
    return Registration(addresses, URL, lambda: world.state, repeat_s=repeat_s, retry_s=0.05, look_s=0.01)


async def test_it_is_registered_when_ready_and_not_before() -> None:
    world = World()
    world.state = STARTING
    async with bootstrap() as one, bootstrap() as two:
        kept = registration(world, one.address, two.address + "/")
        await asyncio.sleep(0.1)
        assert not one.calls and not two.calls
        world.state = READY
        await until(lambda: one.urls == two.urls == {URL})
        assert one.calls == ["POST /register_encoder_url"]
        await kept.close()
        assert not one.urls and not two.urls
        assert one.calls[-1] == "DELETE /unregister_encoder_url"


async def test_draining_takes_it_back_at_once() -> None:
    world = World()
    async with bootstrap() as server:
        kept = registration(world, server.address)
        await until(lambda: bool(server.urls))
        world.state = replace(READY, draining=True)
        await until(lambda: not server.urls)
        await kept.close()
        assert server.calls == ["POST /register_encoder_url", "DELETE /unregister_encoder_url"]


async def test_a_bootstrap_that_forgot_is_told_again() -> None:
    world = World()
    async with bootstrap() as server:
        kept = registration(world, server.address, repeat_s=0.05)
        await until(lambda: bool(server.urls))
        server.urls.clear()
        await until(lambda: bool(server.urls))
        await kept.close()


async def test_one_that_is_away_or_refuses_is_tried_again_and_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with bootstrap() as refusing, bootstrap() as good:
        refusing.status = "500 No"
        kept = registration(world, away, refusing.address, good.address)
        await until(lambda: bool(good.urls) and len(refusing.calls) > 5)
        refusing.status = "200 OK"
        await until(lambda: bool(refusing.urls))
        await kept.close()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2, "each once"
    assert any("status 500" in text for text in warned)


async def test_one_that_never_answers_does_not_hold_up_the_end() -> None:
    world = World()

    async def silent(exchange: Exchange) -> None:
        await exchange.hang_up()

    async with web(silent) as server:
        kept = registration(world, f"http://127.0.0.1:{server.port}")
        await until(lambda: bool(server.seen))
        await asyncio.wait_for(kept.close(), 30)


async def test_where_it_is_reached() -> None:
    for host, family, wanted in (("127.0.0.1", socket.AF_INET, "127.0.0.1"), ("::1", socket.AF_INET6, "[::1]")):
        with socket.create_server((host, 0), family=family) as sock:
            assert advertised_url(sock) == f"http://{wanted}:{sock.getsockname()[1]}"
    with socket.create_server(("0.0.0.0", 0)) as sock:
        url = advertised_url(sock)
        assert url.endswith(f":{sock.getsockname()[1]}")
