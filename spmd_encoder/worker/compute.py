"""The compute thread: one per rank, owner of all device work and of all collectives."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from spmd_encoder.worker.allocator import give_back_freed_memory

T = TypeVar("T")
_Call: TypeAlias = tuple[Callable[[], Any], asyncio.Future[Any]]
_IDLE_S = 5.0
"""Less than the time between two probes of an idle replica (`--probe-interval-s`)."""


class ComputeThread:
    """Runs calls one after another, in the order in which they were submitted.

    `busy_s` tells how long the present call runs: a peer that is stuck shows as a call that does not end. `cpu_s` is
    the thread's own CPU time up to the end of the last call.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._started: float | None = None
        self.cpu_s = 0.0
        # A daemon: a call stuck in a collective must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, future))
        return future

    @property
    def busy_s(self) -> float:
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

    def slept(self, gap_s: float) -> None:
        """This process stood still for so long, which is no time of the present call's."""
        if self._started is not None:
            self._started += gap_s

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            call, future = entry
            self._started = time.monotonic()
            try:
                result, error = call(), None
            except BaseException as caught:  # handed to whoever awaits
                result, error = None, caught
            self._started = None
            self.cpu_s = time.thread_time()
            self._loop.call_soon_threadsafe(_resolve, future, result, error)
            del call, future, result, error, entry

    def _next(self) -> _Call | None:
        try:
            return self._calls.get(timeout=_IDLE_S)
        except queue.Empty:
            give_back_freed_memory()
            return self._calls.get()


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if isinstance(error, StopIteration):  # a future refuses it
        error = RuntimeError("the call raised StopIteration")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
