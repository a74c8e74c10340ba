"""Threads for calls that may hang for ever: name lookups, files of a network that is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class DaemonThreads:
    """At most `limit` calls at once, each in a thread of its own; the others wait in order.

    Unlike an executor's threads, these do not keep the process from ending. A call whose caller is cancelled runs to
    its end unheard, and keeps its place until then.
    """

    def __init__(self, limit: int, name: str = "media-fetch") -> None:
        self._name = name
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[[], T]) -> T:
        """`function()`, or what it raises."""
        loop = asyncio.get_running_loop()
        job: Future[T] = Future()
        job.set_running_or_notify_cancel()  # from here on a cancelled caller leaves it alone

        def work() -> None:
            try:
                job.set_result(function())
            except BaseException as error:
                job.set_exception(error)
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(self._free.release)

        await self._free.acquire()
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError:  # no thread could be had
            self._free.release()
            raise
        return await asyncio.wrap_future(job)
