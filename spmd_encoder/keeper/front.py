"""What only a front-end candidate's keeper has: the ports, the front ends, the dispatcher."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spmd_encoder.config import Config, ServerConfig
from spmd_encoder.dispatcher.dispatcher import DPDispatcher
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import StartupError
from spmd_encoder.frontends.base import FrontEnd
from spmd_encoder.frontends.destinations import Destinations
from spmd_encoder.frontends.registry import FRONT_ENDS, load_front_end, wanted_ports
from spmd_encoder.frontends.sglang.dialect import SglangDialect
from spmd_encoder.frontends.shared import Shared
from spmd_encoder.keeper.address import advertised_url
from spmd_encoder.keeper.descriptors import max_connections
from spmd_encoder.keeper.starter import SpawnStarter
from spmd_encoder.runtime.control import launch_dp_runtime
from spmd_encoder.transports.registry import load_writer
from spmd_encoder.wire.messages import Endpoint, Stop

log = logging.getLogger(__name__)

BACKLOG = 2048
REPLIES_TIMEOUT_S = 2.0
_GC_THRESHOLDS = (10_000, 20, 20)


def bind_ports(server: ServerConfig) -> dict[str, socket.socket]:
    """Every front end's socket, bound and listening: binding alone proves nothing.

    Raises StartupError: exit code 3 where a port cannot be had, 2 where a front end is not installed.
    """
    bound: dict[str, socket.socket] = {}
    try:
        for name, port in wanted_ports(server).items():
            bound[name] = _bind(server.host, port, FRONT_ENDS[name].flag)
    except StartupError:
        _close_all(bound)
        raise
    return bound


def _bind(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {host} is no address of this machine: {error}", exit_code=3) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        where = f"{host}:{port}"
        why = f"{where} is taken by another process" if error.errno == errno.EADDRINUSE else f"{where}: {error}"
        raise StartupError(f"cannot listen, {why}; choose another {flag} or --host", exit_code=3) from None
    sock.setblocking(False)
    return sock


def _spare_the_loop() -> None:
    """The garbage collector stops the event loop, under load for some tenths of a second each time: have it look
    seldom, and never at what was imported, which is here to stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _close_all(socks: Mapping[str, socket.socket]) -> None:
    for sock in socks.values():
        sock.close()


class FrontHost:
    """The front ends and the dispatcher of a candidate, answering from the first moment on."""

    def __init__(
        self,
        dispatcher: DPDispatcher,
        endpoint: Endpoint,
        front_ends: Mapping[str, FrontEnd],
        dialect: SglangDialect,
        destinations: Destinations,
        stack: AsyncExitStack,
    ) -> None:
        self.dispatcher = dispatcher
        self.endpoint = endpoint
        self._front_ends = front_ends
        self._dialect = dialect
        self._destinations = destinations
        self._stack = stack
        self._serving = {
            name: asyncio.create_task(front_end.serve(), name=f"front-end-{name}")
            for name, front_end in front_ends.items()
        }

    @classmethod
    async def open(
        cls, config: Config, layout: Layout, socks: Mapping[str, socket.socket], *, run_dir: Path, host: str
    ) -> FrontHost:
        """Takes over `socks`, as `bind_ports` gave them. Raises StartupError: no Mooncake where it is wanted."""
        stack = AsyncExitStack()
        names = {name: sock.getsockname() for name, sock in socks.items()}
        url = advertised_url(socks["http"])
        front_ends = {}
        try:
            dispatcher, endpoint = await launch_dp_runtime(config, layout, run_dir=run_dir, host=host, stack=stack)
            writer = load_writer(config, SpawnStarter(), urlsplit(url).hostname or "127.0.0.1")
            shared = Shared.open(dispatcher, config, writer=writer)
            stack.push_async_callback(shared.close)
            if writer is not None:
                await writer.start()
            share = max_connections() // len(socks)
            for name, sock in socks.items():
                make = load_front_end(name)
                front_ends[name] = make(dispatcher, config, sock, max_connections=share, shared=shared)
        except BaseException:
            _close_all(socks)
            await stack.aclose()
            raise
        if bootstraps := config.sglang.encoder_register_urls:
            # Not before, since it loads an HTTP client, 8 MB that few servers need.
            from spmd_encoder.keeper.bootstrap import Registration

            registration = Registration(bootstraps, url, dispatcher.ready_state)
            # Undone first, before the dispatcher ends.
            stack.push_async_callback(registration.close)
        _spare_the_loop()
        for protocol, name in names.items():
            log.info("listening on %s://%s:%d", protocol, f"[{name[0]}]" if ":" in name[0] else name[0], name[1])
        return cls(dispatcher, endpoint, front_ends, shared.dialect, shared.destinations, stack)

    async def wait_failed(self) -> Stop:
        """Resolves when the world must end because of what lives here."""
        ended = self.dispatcher.ended
        watched: set[asyncio.Future[Any]] = {ended, *self._serving.values()}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        name, task = next((name, task) for name, task in self._serving.items() if task.done())
        error = None if task.cancelled() else task.exception()
        return Stop(exit_code=1, reason=f"the {name} front end ended: {error!r}")

    async def drain(self, deadline_s: float) -> bool:
        """Refuse what is new and finish what is accepted, parts that wait for SGLang's receivers and deliveries on
        their way too: whether all of it was done in time. The ports stay open, as these receivers register by calls of
        their own."""
        end = asyncio.get_running_loop().time() + deadline_s
        clean = await self.dispatcher.drain(deadline_s)
        try:
            async with asyncio.timeout_at(end):
                await self._dialect.drain()
                await self._destinations.drain()
        except TimeoutError:
            log.error("drain deadline of %.0f s passed with embeddings that wait for their receivers", deadline_s)
            return False
        return clean

    async def close(self) -> None:
        """Send the replies that are ready, close the ports, then the dispatcher."""
        for front_end in self._front_ends.values():
            front_end.stop(REPLIES_TIMEOUT_S)
        serving = self._serving.values()
        await asyncio.wait(serving, timeout=REPLIES_TIMEOUT_S + 2.0)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await self._stack.aclose()
