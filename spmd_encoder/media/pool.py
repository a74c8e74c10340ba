"""A pool of processes that decode and preprocess: off the event loop, off the forward's GIL, and expendable.

A picture that kills its decoder costs that decoder and itself, nothing else. Each process answers one request after
another (`media.line`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from spmd_encoder.api.processes import StartedProcess
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.cpu_time import cpu_seconds
from spmd_encoder.media.line import PreparerLine
from spmd_encoder.media.refusals import KEPT_S, Refusals
from spmd_encoder.wire.preparing import Prepare, PreparedItem, PrepareFailed

T = TypeVar("T")
log = logging.getLogger(__name__)

TRIES = 2
"""A decoder may also be killed from outside: an item is to blame when it took two with it."""
LEAST_CPU_SHARE = 0.5
"""Of its time. An item that had less of a processor is not slow: the machine is busy, or the process stood still."""
START_TIMEOUT_S = 60.0
START_PAUSE_S = 0.5
GRACE_S = 1.0
"""For an answer that is here when its time is over, to be read."""
END_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Prepared:
    """What came back: `buffers` hold the tensors of `item.tensors`, in order, little-endian and C-order."""

    item: PreparedItem
    buffers: list[bytearray]


@dataclass
class _Slot:
    """A place for one process; `line` leads to it."""

    process: StartedProcess | None = None
    line: PreparerLine | None = None

    def empty(self) -> None:
        process, self.process = self.process, None
        line, self.line = self.line, None
        if process is not None and line is not None:
            line.close()
            process.sock.close()


class PreparerPool:
    """`start` starts one process; `pids` are those that live. `cpu_seconds` tells a process's time on processors."""

    def __init__(
        self,
        start: Callable[[], Awaitable[StartedProcess]],
        num_processes: int,
        *,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        cpu_seconds: Callable[[int], float | None] = cpu_seconds,
    ) -> None:
        self._start = start
        self._cpu_seconds = cpu_seconds
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._slots = [_Slot() for _ in range(num_processes)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="preparers")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refusals = Refusals()
        self._closed = False
        self._first = asyncio.Event()
        for slot in self._slots:
            self._keep(self._refill(slot))

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(slot.process.pid for slot in self._slots if slot.process is not None)

    async def run(self, request: Prepare, media: bytes | memoryview) -> Prepared:
        """Have one item prepared. Raises EncoderError: what the process says, or MEDIA_CORRUPT where the item killed
        two processes or took longer than the timeout; items of the same key are then refused at once for `KEPT_S`, by
        this pool alone. OVERLOADED, and nothing is remembered, where it took longer because it had no processor.

        Cancelling it gives up the answer; the process is used again when it is done with the item.
        """
        self._check(request)
        slot = await self._idle.get()
        return await asyncio.shield(self._keep(self._prepare(slot, request, media)))

    async def wait_ready(self) -> None:
        """Until one process has loaded: from then on items are prepared."""
        await self._first.wait()

    async def close(self) -> None:
        """Kill the processes. May be called again."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)
        for slot in self._slots:
            if (process := slot.process) is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
                slot.empty()
        self._threads.shutdown(wait=False)

    async def _prepare(self, slot: _Slot, request: Prepare, media: bytes | memoryview) -> Prepared:
        try:
            self._check(request)  # an equal item may have failed while this one waited
            for _ in range(TRIES):
                await self._ready(slot)
                try:
                    return await self._ask(slot, request, media)
                except ConnectionError:
                    await self._lose(slot)
                    log.warning("a decoder died while it prepared item %s", request.digest)
            raise self._refused(request, f"{TRIES} decoder processes died of this item")
        finally:
            if slot.process is not None:
                self._idle.put_nowait(slot)
            elif not self._closed:
                self._keep(self._refill(slot))

    async def _ask(self, slot: _Slot, request: Prepare, media: bytes | memoryview) -> Prepared:
        assert slot.process is not None and slot.line is not None
        process, line = slot.process, slot.line
        before = self._cpu_seconds(process.pid)
        at_end: list[float | None] = []

        def end(is_last: bool) -> None:
            if not is_last and line.has_news():  # this loop itself stood still
                timers.append(loop.call_later(GRACE_S, end, True))
                return
            at_end.append(self._cpu_seconds(process.pid))
            process.kill()  # which also ends the exchange

        loop = asyncio.get_running_loop()
        timers = [loop.call_later(self._timeout_s, end, False)]
        try:
            reply, buffers = await line.ask(request, media)
        except ConnectionError:
            if not at_end:
                raise
            await self._lose(slot)
            had = at_end[0]
            raise self._too_slow(request, None if before is None or had is None else had - before) from None
        finally:
            for timer in timers:
                timer.cancel()
        if at_end:  # it was in time, just
            await self._lose(slot)
        if isinstance(reply, PrepareFailed):
            raise EncoderError(reply.code, reply.message)
        return Prepared(reply, buffers)

    def _check(self, request: Prepare) -> None:
        if (reason := self._refusals.reason(request.key, time.monotonic())) is not None:
            raise EncoderError(ErrorCode.MEDIA_CORRUPT, reason)

    def _too_slow(self, request: Prepare, cpu_s: float | None) -> EncoderError:
        """`cpu_s`: the processor's time that it had. The item is to blame only where it had most of the time."""
        why = f"the item was not decoded and preprocessed within {self._timeout_s:g} s (--preprocess-timeout-s)"
        if cpu_s is None or cpu_s >= self._timeout_s * LEAST_CPU_SHARE:
            return self._refused(request, why)
        return EncoderError(
            ErrorCode.OVERLOADED, f"{why}: it had a processor for {cpu_s:.1f} s of these; try again later"
        )

    def _refused(self, request: Prepare, why: str) -> EncoderError:
        reason = f"{why}; this replica refuses equal items for {KEPT_S / 60:g} minutes"
        self._refusals.add(request.key, reason, time.monotonic())
        return EncoderError(ErrorCode.MEDIA_CORRUPT, reason)

    async def _lose(self, slot: _Slot) -> None:
        if (process := slot.process) is not None:
            process.kill()
            slot.empty()
            await process.wait()

    async def _fill(self, slot: _Slot) -> None:
        """Raises OSError, also where it does not load in time."""
        process = await self._start()
        process.sock.setblocking(True)
        line = PreparerLine(process.sock, self._threads)
        loading = asyncio.ensure_future(line.wait_ready())
        try:
            await asyncio.wait({loading}, timeout=self._start_timeout_s)
            if not loading.done():
                process.kill()  # upon which it is
                await asyncio.wait({loading})
                raise TimeoutError(f"it did not load within {self._start_timeout_s:g} s")
            loading.result()
        except BaseException:
            process.kill()
            process.sock.close()
            raise
        slot.process, slot.line = process, line
        self._first.set()

    async def _ready(self, slot: _Slot) -> None:
        """See that the slot has a process that lives. Its time to load counts for no item, nor do failures to start."""
        if slot.line is not None and slot.line.has_news():
            log.warning("a decoder died while it had nothing to do")
            await self._lose(slot)
        while slot.process is None:
            try:
                await self._fill(slot)
            except OSError as error:
                log.error("a decoder process could not be started: %s", error)
                await asyncio.sleep(START_PAUSE_S)

    async def _refill(self, slot: _Slot) -> None:
        """Make a slot without a process ready for the next item, and only then idle."""
        await self._ready(slot)
        self._idle.put_nowait(slot)

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """As a task that outlives whoever waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, EncoderError):
            log.error("preparing failed: %r", error)
