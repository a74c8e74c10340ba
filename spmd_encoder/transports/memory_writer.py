"""Writes rows into receivers' memory by a process of its own, which is started anew whenever it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import FileIO

from spmd_encoder.api.processes import ProcessStarter, StartedProcess
from spmd_encoder.errors import StartupError
from spmd_encoder.transports.base import Buffer
from spmd_encoder.wire.codec import WireError
from spmd_encoder.wire.messages import ChildSpec, WriterSpec
from spmd_encoder.wire.streams import Stream, over_socket, send_with_descriptor
from spmd_encoder.wire.writing import FromWriter, ProbeSession, WriteMemory, WriterAnswer, WriterFailing, WriterReady

log = logging.getLogger(__name__)

MAX_WRITES = 8
"""Most writes at once; each holds a copy of its rows."""
MAX_SESSION_WRITES = 4
"""Most of them to one receiver's engine, so that one that stands still leaves room for others."""
MAX_KNOWN = 1024
RESTART_S = 0.5
_START_S = 60.0
_DIE_S = 1.0
_INSTALL = "install the extra with: pip install 'spmd-encoder[mooncake]', and the system's libibverbs1"


class WriteError(Exception):
    """The rows are not there, or not known to be; the message says why."""


class _Life:
    """One process, from its first word to its end."""

    def __init__(self, child: StartedProcess, stream: Stream[FromWriter]) -> None:
        self._child = child
        self._stream = stream
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[str]] = {}
        self.writes = 0
        self.known: set[str] = set()
        """Sessions that have answered."""
        self.is_worn = False
        """Mooncake remembers of a session what was true before, so after a failure it is started anew, when it has
        nothing to do."""
        self.ended = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def takes_work(self) -> bool:
        return not self.is_worn and not self.ended.done()

    async def probe(self, session: str) -> None:
        """Raises WriteError. Mooncake makes all others wait while it connects to one that does not answer; this does
        not."""
        if session in self.known:
            return
        call_id = next(self._ids)
        await self._answer(call_id, ProbeSession(call_id=call_id, session=session), None)
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known.add(session)

    async def write(self, descriptor: int, num_bytes: int, session: str, address: int) -> None:
        """Raises WriteError. Does not end before the write has, for who is told of a failure uses the memory anew: a
        cancelled caller costs the process."""
        call_id = next(self._ids)
        call = WriteMemory(call_id=call_id, session=session, address=address, num_bytes=num_bytes)
        self.writes += 1
        try:
            await self._answer(call_id, call, descriptor)
        except WriteError:
            self.is_worn = True
            raise
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait([self.ended], timeout=_DIE_S)
            raise
        finally:
            self.writes -= 1
            if self.is_worn and not self.writes:
                self.kill()

    def kill(self) -> None:
        self._child.kill()

    async def _answer(self, call_id: int, call: ProbeSession | WriteMemory, descriptor: int | None) -> None:
        answer = self._open[call_id] = asyncio.get_running_loop().create_future()
        try:
            if self.ended.done():
                raise WriteError("the process that writes has ended")
            try:
                send_with_descriptor(self._child.sock, call, descriptor)
            except OSError as error:
                raise WriteError(f"the process that writes takes no orders: {error.strerror}") from None
            if error_text := await answer:
                raise WriteError(error_text)
        finally:
            del self._open[call_id]

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._stream.receive(), WriterAnswer):
                answer = self._open.get(message.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message.error)
        except WireError as error:
            log.error("what the writer says cannot be read: %s", error)
        code = await _end_of(self._child)
        self._stream.close()
        for answer in self._open.values():
            if not answer.done():
                answer.set_result(f"the process that writes ended with code {code}")
        log.log(logging.DEBUG if self.is_worn else logging.WARNING, "the writer %d ended with code %d", self.pid, code)


class MemoryWriter:
    """Belongs to one event loop."""

    def __init__(self, starter: ProcessStarter[ChildSpec], spec: WriterSpec) -> None:
        self._starter = starter
        self._spec = spec
        self._starting = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._life: _Life | None = None
        self._busy: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that writes, where one is ready."""
        return self._life.pid if self._life is not None and self._life.takes_work else None

    async def start(self) -> None:
        """Have the process, the first time that it is called. Raises StartupError, exit code 2 without Mooncake."""
        async with self._starting:
            if self._keeping is None and not self._closed:
                self._life = await self._launch()
                self._keeping = asyncio.create_task(self._keep(self._life))

    async def write(self, chunks: Sequence[Buffer], num_bytes: int, session: str, address: int) -> None:
        """Have `chunks`, one after another, at `address` of the process at `session` (`host:port`). Raises WriteError.

        A caller that is cancelled knows that nothing is written there any more.
        """
        try:
            await self.start()
        except StartupError as error:
            raise WriteError(error.message) from None
        async with self._place(session):
            life = await self._ready()
            await life.probe(session)
            with FileIO(os.memfd_create("rows", os.MFD_CLOEXEC), "w") as rows:
                copying = asyncio.create_task(asyncio.to_thread(_fill, rows, chunks))
                try:
                    await asyncio.shield(copying)
                finally:
                    await asyncio.wait([copying])  # or the thread would write into what is closed
                try:
                    await life.write(rows.fileno(), num_bytes, session, address)
                except WriteError:
                    life.known.discard(session)
                    raise

    async def close(self) -> None:
        """End the process, and all that it does with WriteError. May be called again."""
        self._closed = True
        self._changed.set()
        async with self._starting:
            keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep(self, life: _Life) -> None:
        """Until cancelled."""
        try:
            while True:
                self._life = life
                self._changed.set()
                await asyncio.wait([life.ended])
                life = await self._again()
        finally:
            life.kill()
            await asyncio.wait([life.ended], timeout=_DIE_S)

    async def _again(self) -> _Life:
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                return await self._launch()
            except (StartupError, OSError) as error:
                log.error("the writer cannot be started anew: %s", error)

    async def _launch(self) -> _Life:
        child = await self._starter.start(self._spec)
        stream: Stream[FromWriter] = await over_socket(child.sock, FromWriter)
        try:
            async with asyncio.timeout(_START_S):
                first = await stream.receive()
        except BaseException as error:
            child.kill()
            stream.close()
            if isinstance(error, TimeoutError | WireError):
                raise StartupError(f"the mooncake backend did not start: {error or 'out of time'}") from None
            raise
        if isinstance(first, WriterReady):
            return _Life(child, stream)
        code = await _end_of(child)
        stream.close()
        match first:
            case WriterFailing(reason=reason, is_missing=True):
                why, exit_code = f"needs Mooncake, which cannot be imported ({reason}); {_INSTALL}", 2
            case WriterFailing(reason=reason):
                why, exit_code = f"cannot start: {reason}", 1
            case _:
                why, exit_code = f"cannot start: its process ended with code {code}", 1
        raise StartupError(f"--encoder-transfer-backend mooncake {why}", exit_code=exit_code)

    async def _ready(self) -> _Life:
        """A process that takes work; one that is worn gets no more, and ends when it has nothing to do."""
        while not self._closed:
            if self._life is not None and self._life.takes_work:
                return self._life
            self._changed.clear()
            await self._changed.wait()
        raise WriteError("the server is ending")

    @asynccontextmanager
    async def _place(self, session: str) -> AsyncIterator[None]:
        while self._busy.total() >= MAX_WRITES or self._busy[session] >= MAX_SESSION_WRITES:
            self._changed.clear()
            await self._changed.wait()
            if self._closed:
                raise WriteError("the server is ending")
        self._busy[session] += 1
        try:
            yield
        finally:
            self._busy -= Counter((session,))  # one that is at zero is dropped
            self._changed.set()


async def _end_of(child: StartedProcess) -> int:
    """The exit code of one that has hung up. Waited for before anything is done to it: a kill that comes late would
    take the code away."""
    try:
        async with asyncio.timeout(_DIE_S):
            return await child.wait()
    except TimeoutError:
        child.kill()
        return await child.wait()


def _fill(rows: FileIO, chunks: Sequence[Buffer]) -> None:
    for chunk in chunks:
        left = memoryview(chunk).cast("B")
        while left:
            left = left[rows.write(left) :]
