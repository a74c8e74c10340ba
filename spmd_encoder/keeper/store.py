"""The rendezvous store where no torchrun agent hosts one: a process of its own, started by rank 0's keeper."""

from __future__ import annotations

import asyncio
import logging
import time

from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.starter import Child, SpawnStarter
from spmd_encoder.launch_env import LaunchEnv
from spmd_encoder.wire.messages import FromWorker, StoreReady, StoreSpec
from spmd_encoder.wire.streams import Stream, over_socket

log = logging.getLogger(__name__)
DEATHS_ALLOWED = 3
WINDOW_S = 60.0


class StoreHost:
    """`host` and `port` are where the world's store is; `start` makes it be there, `run` keeps it there."""

    def __init__(self, env: LaunchEnv) -> None:
        self.host = env.master_addr or "127.0.0.1"
        self.port = env.master_port
        self._hosted_here = env.rank == 0 and not env.agent_store
        self._child: Child | None = None
        self._stream: Stream[FromWorker] | None = None

    async def start(self) -> None:
        """Raises StartupError (exit code 3) where it cannot be hosted."""
        if not self._hosted_here:
            return
        # Spawned and not forked: it must outlive the nursery, or no replica could ever be formed anew.
        self._child = await SpawnStarter().start(StoreSpec(host=self.host, port=self.port))
        self._stream = await over_socket(self._child.sock, FromWorker)
        ready = await self._stream.receive()
        if not isinstance(ready, StoreReady):
            await self._child.output.finished()
            lines = " | ".join(self._child.output.last_lines)
            raise StartupError(f"cannot host the rendezvous store at {self.host}:{self.port}: {lines}", exit_code=3)
        self.port = ready.port

    async def run(self) -> None:
        """Until cancelled: start it anew, on its port, when it dies. Raises StartupError when it dies too often.

        An empty one is enough: every epoch of a replica has keys of its own, and a start under way begins anew.
        """
        deaths: list[float] = []
        while self._child is not None:
            code = await self._child.wait()
            now = time.monotonic()
            deaths = [t for t in deaths if now - t < WINDOW_S] + [now]
            log.error("the rendezvous store ended with code %d (%d in the last minute)", code, len(deaths))
            if len(deaths) >= DEATHS_ALLOWED:
                raise StartupError(
                    f"the rendezvous store died {len(deaths)} times within {WINDOW_S:.0f} s", exit_code=4
                )
            await self.start()
        await asyncio.Event().wait()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
