"""What only a front-end candidate's keeper has: the port, HTTP, the dispatcher."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from spmd_encoder.config import Config, ServerConfig
from spmd_encoder.dispatcher.dispatcher import DPDispatcher
from spmd_encoder.distributed.layout import Layout
from spmd_encoder.errors import StartupError
from spmd_encoder.frontends.base import FrontEnd
from spmd_encoder.frontends.registry import load_front_end
from spmd_encoder.keeper.bootstrap import Registration, advertised_url
from spmd_encoder.keeper.descriptors import max_connections
from spmd_encoder.runtime.control import launch_dp_runtime
from spmd_encoder.wire.messages import Endpoint, Stop

log = logging.getLogger(__name__)

BACKLOG = 2048
REPLIES_TIMEOUT_S = 2.0


def bind_port(server: ServerConfig) -> socket.socket:
    """Bound and listening: binding alone proves nothing. Raises StartupError (exit code 3)."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {server.host} is no address of this machine: {error}", exit_code=3) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        where = f"{server.host}:{server.port}"
        why = f"{where} is taken by another process" if error.errno == errno.EADDRINUSE else f"{where}: {error}"
        raise StartupError(f"cannot listen, {why}; choose another --port or --host", exit_code=3) from None
    sock.setblocking(False)
    return sock


class FrontHost:
    """The front end and the dispatcher of a candidate, answering from the first moment on."""

    def __init__(
        self, dispatcher: DPDispatcher, endpoint: Endpoint, front_end: FrontEnd, stack: AsyncExitStack
    ) -> None:
        self.dispatcher = dispatcher
        self.endpoint = endpoint
        self._front_end = front_end
        self._stack = stack
        self._serving = asyncio.create_task(front_end.serve(), name="front-end")

    @classmethod
    async def open(cls, config: Config, layout: Layout, sock: socket.socket, *, run_dir: Path, host: str) -> FrontHost:
        """Takes over `sock`, as `bind_port` gave it."""
        stack = AsyncExitStack()
        try:
            dispatcher, endpoint = await launch_dp_runtime(config, layout, run_dir=run_dir, host=host, stack=stack)
            front_end = load_front_end("http")(dispatcher, config, sock, max_connections=max_connections())
        except BaseException:
            sock.close()
            await stack.aclose()
            raise
        if bootstraps := config.sglang.encoder_register_urls:
            registration = Registration(bootstraps, advertised_url(sock), dispatcher.ready_state)
            # Undone first, before the dispatcher ends.
            stack.push_async_callback(registration.close)
        name = sock.getsockname()
        shown = f"[{name[0]}]" if ":" in name[0] else name[0]
        log.info("listening on http://%s:%d", shown, name[1])
        return cls(dispatcher, endpoint, front_end, stack)

    async def wait_failed(self) -> Stop:
        """Resolves when the world must end because of what lives here."""
        ended = self.dispatcher.ended
        watched: set[asyncio.Future[Any]] = {ended, self._serving}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        error = None if self._serving.cancelled() else self._serving.exception()
        return Stop(exit_code=1, reason=f"the front end ended: {error!r}")

    async def close(self) -> None:
        """Send the replies that are ready, close the port, then the dispatcher."""
        self._front_end.stop(REPLIES_TIMEOUT_S)
        await asyncio.wait({self._serving}, timeout=REPLIES_TIMEOUT_S + 2.0)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self._stack.aclose()
