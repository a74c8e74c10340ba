"""`HttpFrontEnd`: uvicorn inside the caller's event loop, on a socket that listens already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator

import uvicorn

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.frontends.http.app import create_app
from spmd_encoder.frontends.http.body import DEFAULT_TIMEOUTS, Timeouts
from spmd_encoder.frontends.http.hosts import host_rule
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.http.protocol import EncoderHttpProtocol
from spmd_encoder.frontends.http.turns import Turns
from spmd_encoder.frontends.shared import Shared
from spmd_encoder.observability.logging import SparseLog

log = logging.getLogger(__name__)

# How long cancelled requests may take to end after a drain's deadline.
_UNWIND_S = 1.0
# Connections that the system holds until they are accepted: a burst of clients must not be turned away.
_BACKLOG = 2048
# How many are accepted in one turn of the loop, before any can be refused: they take descriptors.
_ACCEPT_AT_ONCE = 64


class _Server(uvicorn.Server):
    """Leaves signals alone: they belong to the process that hosts this server."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_BACKLOG)  # asyncio has only one number for this and for `_ACCEPT_AT_ONCE`

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpFrontEnd:
    """Takes over `sock`, which is bound and listens; it is closed when `serve` returns.

    `shared` stays the caller's; without one the front end has its own."""

    def __init__(
        self,
        service: EncoderService,
        config: Config,
        sock: socket.socket,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        max_connections: int = 65536,
        shared: Shared | None = None,
    ) -> None:
        self._sock = sock
        # Its connections inherit it. Else a reply's body would wait for the other side to acknowledge its head.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._owns_shared = shared is None
        self.shared = shared = shared or Shared.open(service, config)
        settings: dict[str, object] = {"header_s": timeouts.header_s, "reply_idle_s": timeouts.reply_idle_s}
        metrics = HttpMetrics(shared.registry)
        turns = Turns(config.limits.max_queued_items, service, metrics)
        settings |= {"max_connections": max_connections, "odd": SparseLog(log), "turns": turns}
        protocol = type("_Protocol", (EncoderHttpProtocol,), settings)
        self._config = uvicorn.Config(
            create_app(
                service,
                config,
                pool=shared.pool,
                fetcher=shared.fetcher,
                metrics=metrics,
                dialect=shared.dialect,
                destinations=shared.destinations,
                timeouts=timeouts,
                hosts=host_rule(sock, config.server.allowed_hosts),
            ),
            http=protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_ACCEPT_AT_ONCE,
            timeout_keep_alive=max(1, round(timeouts.keep_alive_s)),
        )
        self._server = _Server(self._config)

    @property
    def is_serving(self) -> bool:
        """Whether connections are being accepted."""
        return self._server.started and not self._server.should_exit

    async def serve(self) -> None:
        """Answer until `stop`; return when the replies in flight are sent and all connections are closed."""
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            await self._end()

    def stop(self, timeout_s: float | None = None) -> None:
        """Close the listener and idle connections; cancel what still runs after `timeout_s` seconds (None: never)."""
        # uvicorn types this as whole seconds but hands it to asyncio.wait_for, which takes any.
        self._config.timeout_graceful_shutdown = timeout_s  # type: ignore[assignment]
        self._server.should_exit = True

    async def _end(self) -> None:
        """What uvicorn leaves behind when `serve` was cancelled or its drain took too long."""
        for listener in getattr(self._server, "servers", ()):
            listener.close()
        state = self._server.server_state
        tasks = set(state.tasks)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_UNWIND_S)
        for connection in list(state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()
        self._sock.close()
        if self._owns_shared:
            await self.shared.close()
