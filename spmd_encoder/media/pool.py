"""A pool of processes that decode and preprocess: off the event loop, off the forward's GIL, and expendable.

A picture that kills its decoder costs that decoder and itself, nothing else. Each process answers one request after
another (`media.line`). An item is asked in one turn of the loop and answered in another; only what befalls few of them,
a process that is started or has died, is a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from spmd_encoder.api.processes import StartedProcess
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.cpu_time import cpu_seconds
from spmd_encoder.media.line import Prepared, PreparerLine
from spmd_encoder.media.refusals import KEPT_S, Refusals
from spmd_encoder.media.watchdog import Watchdog
from spmd_encoder.wire.preparing import Prepare

log = logging.getLogger(__name__)

TRIES = 2
"""A decoder may also be killed from outside: an item is to blame when it took two with it."""
LEAST_CPU_SHARE = 0.5
"""Of its time. An item that had less of a processor is not slow: the machine is busy, or the process stood still."""
START_TIMEOUT_S = 60.0
START_PAUSE_S = 0.5
END_TIMEOUT_S = 2.0


@dataclass(eq=False)
class _Question:
    """One item. Its `answer` is done early where its caller has gone."""

    request: Prepare
    media: bytes | memoryview
    answer: asyncio.Future[Prepared]
    deaths: int = 0

    def settle(self, outcome: Prepared | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(outcome, Prepared):
            self.answer.set_result(outcome)
        else:
            self.answer.set_exception(outcome)

    def given_up(self, answer: asyncio.Future[Prepared]) -> None:
        """Its file need not wait for its turn: more and more of them would lie here."""
        if answer.cancelled():
            self.media = b""


@dataclass(eq=False)
class _Preparer:
    """A process that has loaded, and what it is asked."""

    process: StartedProcess
    line: PreparerLine
    watchdog: Watchdog
    question: _Question | None = None

    def end(self) -> None:
        """SIGKILL, and nothing is heard of it any more."""
        self.process.kill()
        self.watchdog.close()
        self.line.close()
        self.process.sock.close()


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
        self._loop = asyncio.get_running_loop()
        self._preparers: list[_Preparer] = []
        self._idle: list[_Preparer] = []
        self._waiting: deque[_Question] = deque()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="preparers")
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals = Refusals()
        self._first = asyncio.Event()
        for _ in range(num_processes):
            self._keep(self._add())

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(preparer.process.pid for preparer in self._preparers)

    def run(self, request: Prepare, media: bytes | memoryview) -> asyncio.Future[Prepared]:
        """Have one item prepared. Raises EncoderError: what the process says, or MEDIA_CORRUPT where the item killed
        two processes or took longer than the timeout; items of the same key are then refused at once for `KEPT_S`, by
        this pool alone. OVERLOADED, and nothing is remembered, where it took longer because it had no processor.

        Cancelling it gives up the answer; the process is used again when it is done with the item.
        """
        question = _Question(request, media, self._loop.create_future())
        if (reason := self._refusals.reason(request.key, time.monotonic())) is not None:
            question.settle(EncoderError(ErrorCode.MEDIA_CORRUPT, reason))
        else:
            self._waiting.append(question)
            self._hand_out()
            if self._waiting and self._waiting[-1] is question:
                question.answer.add_done_callback(question.given_up)
        return question.answer

    async def wait_ready(self) -> None:
        """Until one process has loaded: from then on items are prepared."""
        await self._first.wait()

    async def close(self) -> None:
        """Kill the processes, and give up what they are asked. May be called again."""
        tasks, preparers = list(self._tasks), list(self._preparers)
        questions = [*self._waiting, *(p.question for p in preparers if p.question is not None)]
        for waiting in (self._preparers, self._idle, self._waiting):
            waiting.clear()
        for task in tasks:
            task.cancel()
        for preparer in preparers:
            preparer.end()
        for question in questions:
            question.answer.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for preparer in preparers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(preparer.process.wait(), END_TIMEOUT_S)
        self._threads.shutdown(wait=False)

    def _hand_out(self) -> None:
        """What waits, oldest first, to whoever is idle: to the one that was at work last, whose memory is warm."""
        while self._waiting and self._idle:
            if self._waiting[0].answer.done():
                self._waiting.popleft()
            elif self._idle[-1].line.has_news():
                self._idle.pop()  # it has gone, as its line is about to tell
            else:
                self._ask(self._idle.pop(), self._waiting.popleft())

    def _ask(self, preparer: _Preparer, question: _Question) -> None:
        preparer.question = question
        preparer.watchdog.begin()
        preparer.line.ask(question.request, question.media)

    def _told(self, preparer: _Preparer, outcome: Prepared | Exception) -> None:
        """By its line: the answer to its question, or that the process has gone."""
        question, preparer.question = preparer.question, None
        preparer.watchdog.end()
        if isinstance(outcome, ConnectionError):
            self._lose(preparer, self._to_ask_again(preparer, question))
            return
        if question is not None:
            question.settle(outcome)
        if preparer.watchdog.has_killed:  # the answer was in time, just
            self._lose(preparer, None)
        else:
            self._idle.append(preparer)
            self._hand_out()

    def _to_ask_again(self, preparer: _Preparer, question: _Question | None) -> _Question | None:
        """The question whose process has gone, where it gets another one; others are answered."""
        if question is None:
            log.warning("a decoder died while it had nothing to do")
            return None
        if preparer.watchdog.has_killed:
            question.settle(self._too_slow(question.request, preparer.watchdog.cpu_s))
            return None
        log.warning("a decoder died while it prepared item %s", question.request.digest)
        question.deaths += 1
        if question.deaths < TRIES:
            return question
        question.settle(self._refused(question.request, f"{TRIES} decoder processes died of this item"))
        return None

    def _too_slow(self, request: Prepare, cpu_s: float | None) -> EncoderError:
        """`cpu_s`: the processor's time that it had. The item is to blame only where it had most of the time."""
        why = f"the item was not decoded and preprocessed within {self._timeout_s:g} s (--preprocess-timeout-s)"
        if cpu_s is None or cpu_s >= self._timeout_s * LEAST_CPU_SHARE:
            return self._refused(request, why)
        return EncoderError(
            ErrorCode.OVERLOADED, f"{why}: it had a processor for {cpu_s:.1f} s of these; try again later"
        )

    def _refused(self, request: Prepare, why: str) -> EncoderError:
        """Also for equal items that wait."""
        reason = f"{why}; this replica refuses equal items for {KEPT_S / 60:g} minutes"
        self._refusals.add(request.key, reason, time.monotonic())
        for question in self._waiting:
            if question.request.key == request.key:
                question.settle(EncoderError(ErrorCode.MEDIA_CORRUPT, reason))
        return EncoderError(ErrorCode.MEDIA_CORRUPT, reason)

    def _lose(self, preparer: _Preparer, again: _Question | None) -> None:
        """Another process takes its place, and is asked `again` first."""
        self._preparers.remove(preparer)
        if preparer in self._idle:
            self._idle.remove(preparer)
        preparer.end()
        self._keep(self._replace(preparer, again))

    async def _replace(self, preparer: _Preparer, again: _Question | None) -> None:
        try:
            await preparer.process.wait()
            await self._add(again)
        except asyncio.CancelledError:  # the pool is closed
            if again is not None:
                again.answer.cancel()
            raise

    async def _add(self, again: _Question | None = None) -> None:
        """One more process. Its time to load counts for no item, nor do failures to start."""
        while True:
            try:
                preparer = await self._loaded()
                break
            except Exception as error:  # whatever it is, `again` has no other who would ask it
                log.error("a decoder process could not be started: %s", error)
                await asyncio.sleep(START_PAUSE_S)
        self._preparers.append(preparer)
        preparer.line.listen()
        self._first.set()
        if again is not None and not again.answer.done():
            self._ask(preparer, again)
        else:
            self._idle.append(preparer)
            self._hand_out()

    async def _loaded(self) -> _Preparer:
        """Raises OSError, also where it does not load in time."""
        process = await self._start()
        process.sock.setblocking(True)
        line = PreparerLine(process.sock, self._threads, lambda outcome: self._told(preparer, outcome))
        watchdog = Watchdog(process, self._timeout_s, has_news=line.has_news, cpu_seconds=self._cpu_seconds)
        preparer = _Preparer(process, line, watchdog)
        loading = asyncio.ensure_future(line.wait_ready())
        try:
            await asyncio.wait({loading}, timeout=self._start_timeout_s)
            if not loading.done():
                process.kill()  # upon which it is
                await asyncio.wait({loading})
                raise TimeoutError(f"it did not load within {self._start_timeout_s:g} s")
            loading.result()
        except BaseException:
            preparer.end()
            raise
        return preparer

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """As a task of its own, whose end `close` waits for."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a decoder process could not be replaced: %r", error)
