"""The rendezvous store where no torchrun agent hosts one: a process of its own, started by rank 0's keeper."""

from __future__ import annotations

from spmd_encoder.config import LaunchEnv
from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.starter import Child, SpawnStarter
from spmd_encoder.wire.messages import StoreReady, StoreSpec


class StoreHost:
    """`host` and `port` are where the world's store is; `start` makes it be there."""

    def __init__(self, env: LaunchEnv) -> None:
        self.host = env.master_addr or "127.0.0.1"
        self.port = env.master_port
        self._hosted_here = env.rank == 0 and not env.agent_store
        self._child: Child | None = None

    async def start(self) -> None:
        if not self._hosted_here:
            return
        # Spawned and not forked: it must outlive the nursery, or no replica could ever be formed anew.
        self._child = await SpawnStarter().start(StoreSpec(host=self.host, port=self.port))
        ready = await self._child.stream.receive()
        if not isinstance(ready, StoreReady):
            lines = " | ".join(self._child.output.last_lines)
            raise StartupError(f"cannot host the rendezvous store at {self.host}:{self.port}: {lines}", exit_code=3)
        self.port = ready.port

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
