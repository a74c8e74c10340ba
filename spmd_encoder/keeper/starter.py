"""How a keeper starts a child: by asking the node's nursery to fork, or by spawning a fresh interpreter."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from spmd_encoder.api.processes import ProcessStarter, StartedProcess
from spmd_encoder.config import LifecycleConfig, worker_environ
from spmd_encoder.errors import StartupError
from spmd_encoder.keeper.nursery_name import SOCKET_NAME
from spmd_encoder.wire.messages import ChildSpec
from spmd_encoder.wire.streams import Pipe

log = logging.getLogger(__name__)

CONNECT_POLL_S = 0.02
FORK_TIMEOUT_S = 10.0
KILLED = -int(signal.SIGKILL)


class Child(StartedProcess, Protocol):
    """A started process and what the keeper has of it."""

    output: Output
    fell_with_nursery: bool
    """It ended because the nursery did: nothing that it worked on is to blame."""


class Starter(ProcessStarter[ChildSpec], Protocol):
    async def start(self, spec: ChildSpec) -> Child: ...


class Output:
    """Copies a child's output to our stderr line by line, and keeps the last lines."""

    def __init__(self, read_fd: int) -> None:
        self.last_lines: deque[str] = deque(maxlen=12)
        self._task = asyncio.ensure_future(self._copy(read_fd))

    async def _copy(self, read_fd: int) -> None:
        reader = asyncio.StreamReader(limit=2**20)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
        )
        try:
            while line := await self._line(reader):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                self.last_lines.append(line.decode(errors="replace").rstrip()[:500])
        finally:
            transport.close()

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readline()
        except ValueError:
            return b"(a line over 1 MiB was dropped)\n"

    async def finished(self, timeout_s: float = 1.0) -> None:
        """Until the child's end is closed, or the time is over (a grandchild may hold it)."""
        await asyncio.wait([self._task], timeout=timeout_s)

    def close(self) -> None:
        self._task.cancel()


class _Wires:
    """A socket pair and an output pipe; the child's ends are closed after they were passed on."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.read_fd, self.write_fd = os.pipe()

    def close_theirs(self) -> None:
        self.theirs.close()
        os.close(self.write_fd)

    def close_ours(self) -> None:
        self.ours.close()
        os.close(self.read_fd)

    def attach(self, spec: ChildSpec) -> tuple[socket.socket, Output]:
        """Our end, after the specification went out, which is small enough for the socket's buffer."""
        Pipe(self.ours).send(spec)
        return self.ours, Output(self.read_fd)


class ForkedChild:
    def __init__(self, pid: int, sock: socket.socket, output: Output, nursery: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.output = output
        self.fell_with_nursery = False
        self._nursery = nursery
        self._exit = asyncio.ensure_future(self._wait())

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    async def _wait(self) -> int:
        loop = asyncio.get_running_loop()
        line = b""
        try:
            while not line.endswith(b"\n"):
                chunk = await loop.sock_recv(self._nursery, 32)
                if not chunk:
                    self.fell_with_nursery = True
                    return KILLED
                line += chunk
            return int(line)
        except OSError:
            return KILLED
        finally:
            self._nursery.close()

    def kill(self) -> None:
        try:
            self._nursery.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is over already


class ForkStarter:
    """Asks the nursery of this node. Waits for it as long as it takes to preload; its keeper watches over it."""

    def __init__(self, run_dir: Path, timeout_s: float) -> None:
        self._path = run_dir / SOCKET_NAME
        self._timeout_s = timeout_s

    async def start(self, spec: ChildSpec) -> ForkedChild:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                wires = _Wires()
                pid, nursery = await self._ask(wires)
                break
            except OSError as error:  # also a timeout: a nursery that does not answer is ended by its keeper
                if time.monotonic() > deadline:
                    raise StartupError(f"the nursery did not answer within {self._timeout_s:.0f} s: {error}") from None
                await asyncio.sleep(CONNECT_POLL_S)
        sock, output = wires.attach(spec)
        return ForkedChild(pid, sock, output, nursery)

    async def _ask(self, wires: _Wires) -> tuple[int, socket.socket]:
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await self._fork(wires)
        except OSError:
            wires.close_ours()
            raise
        finally:
            wires.close_theirs()

    async def _fork(self, wires: _Wires) -> tuple[int, socket.socket]:
        loop = asyncio.get_running_loop()
        nursery = socket.socket(socket.AF_UNIX)
        nursery.setblocking(False)
        try:
            await loop.sock_connect(nursery, str(self._path))
            socket.send_fds(nursery, [b"fork"], [wires.write_fd, wires.theirs.fileno()])
            line = b""
            while not line.endswith(b"\n"):
                chunk = await loop.sock_recv(nursery, 1)
                if not chunk:
                    raise ConnectionError("the nursery refused to fork")
                line += chunk
            return int(line), nursery
        except BaseException:
            nursery.close()
            raise


class SpawnedChild:
    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, output: Output) -> None:
        self.pid = process.pid
        self.sock = sock
        self.output = output
        self.fell_with_nursery = False
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


class SpawnStarter:
    """A fresh interpreter per child: slower, for platforms and tools that cannot live with fork."""

    async def start(self, spec: ChildSpec) -> SpawnedChild:
        wires = _Wires()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "spmd_encoder.keeper.child",
                str(wires.theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=wires.write_fd,
                stderr=wires.write_fd,
                pass_fds=(wires.theirs.fileno(),),
                env=child_environ(),
                start_new_session=True,  # a signal to the keeper's process group is not for the worker
            )
        finally:
            wires.close_theirs()
        sock, output = wires.attach(spec)
        return SpawnedChild(process, sock, output)


def forks(lifecycle: LifecycleConfig) -> bool:
    return lifecycle.worker_start == "fork" or (lifecycle.worker_start == "auto" and platform.system() == "Linux")


def child_starter(run_dir: Path, lifecycle: LifecycleConfig) -> Starter:
    return ForkStarter(run_dir, lifecycle.start_deadline_s) if forks(lifecycle) else SpawnStarter()


def child_environ() -> dict[str, str]:
    """One BLAS/OpenMP thread until the worker has set its own count; CUDA asked about through NVML only."""
    one: dict[str, Any] = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return worker_environ(**one, PYTORCH_NVML_BASED_CUDA_CHECK="1", TOKENIZERS_PARALLELISM="false")
