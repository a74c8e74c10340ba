"""Local rank 0's care for the node's nursery: start it, start it anew when it dies, give up when it dies too often."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_encoder.api.types import ProcessInfo
from spmd_encoder.config import Config
from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.nursery_name import PING, PONG, SOCKET_NAME
from spmd_encoder.keeper.starter import child_environ

log = logging.getLogger(__name__)

DEATHS_ALLOWED = 3
WINDOW_S = 60.0
END_TIMEOUT_S = 2.0
PING_S = 2.0
PING_TIMEOUT_S = 10.0


class NurseryWatch:
    """`on_started` is told of every new nursery."""

    def __init__(self, run_dir: Path, rank: int, config: Config, on_started: Callable[[ProcessInfo], None]) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._config = config
        self._on_started = on_started
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self.info: ProcessInfo | None = None
        self.launched = asyncio.Event()
        """Set once the first nursery's process exists (it is not ready yet)."""

    async def run(self) -> None:
        """Until cancelled. Raises StartupError: the model cannot be had, or the nursery died too often."""
        deaths: list[float] = []
        while True:
            code = await self._live_once()
            now = time.monotonic()
            deaths = [t for t in deaths if now - t < WINDOW_S] + [now]
            log.error("the nursery ended with code %s (%d in the last minute)", code, len(deaths))
            if len(deaths) >= DEATHS_ALLOWED:
                raise StartupError(f"the nursery died {len(deaths)} times within {WINDOW_S:.0f} s", exit_code=4)

    async def _live_once(self) -> int:
        self._ready = False
        # Not its stdout, on which whatever it imports may print.
        said, say = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "spmd_encoder.keeper.nursery",
                str(self._run_dir),
                str(os.getpid()),
                str(self._rank),
                str(say),
                self._config.to_json(),
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr,
                pass_fds=(say,),
                env=child_environ(),
            )
        finally:
            os.close(say)
        self.info = ProcessInfo(
            rank=self._rank, dp_rank=0, tp_rank=0, role="nursery", pid=self._process.pid, epoch=None
        )
        self.launched.set()
        self._on_started(self.info)
        if (answer := await self._first_words(said)) is not None:
            if "error" in answer:
                raise StartupError(answer["error"], exit_code=answer["exit_code"])
            log.info("the nursery is ready (pid %d)", self._process.pid)
            self._ready = True
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch(self._process))
            code = await self._process.wait()
            watch.cancel()
        return code

    async def _first_words(self, said: int) -> dict[str, Any] | None:
        """How its start went; None where it died, or has not said so in time and is ended."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(said, "rb", buffering=0)
        )
        try:
            line = await asyncio.wait_for(reader.readline(), self._config.lifecycle.start_deadline_s)
        except TimeoutError:
            log.error("the nursery did not come up within %.0f s", self._config.lifecycle.start_deadline_s)
            assert self._process is not None
            self._process.kill()
            return None
        finally:
            transport.close()
        return dict(json.loads(line)) if line else None

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """End a nursery that does not answer: a stopped one would keep its node from ever healing."""
        while True:
            await asyncio.sleep(PING_S)
            try:
                async with asyncio.timeout(PING_TIMEOUT_S):
                    answered = await _ping(self._run_dir / SOCKET_NAME)
            except TimeoutError:
                answered = False
            if not answered and process.returncode is None:
                log.error("the nursery (pid %d) does not answer; ending it", process.pid)
                process.kill()
                return

    async def close(self) -> None:
        """Closing its input tells the nursery to end and to reap its children first."""
        if self._process is None or self._process.returncode is not None:
            return
        if not self._ready:
            # It has no children yet, and would look at its input only after all its imports.
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def _ping(path: Path) -> bool:
    """False only where the nursery is to blame."""
    loop = asyncio.get_running_loop()
    try:
        caller = socket.socket(socket.AF_UNIX)
    except OSError as error:
        log.error("the nursery could not be asked whether it lives: %s", error)
        return True
    with caller, contextlib.suppress(OSError):
        caller.setblocking(False)
        await loop.sock_connect(caller, str(path))
        await loop.sock_sendall(caller, PING)
        return await loop.sock_recv(caller, len(PONG)) == PONG
    return False
