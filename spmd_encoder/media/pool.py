"""Threads for decoding and preprocessing, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class MediaPool:
    """At most `num_threads` jobs run at once; the others wait in order.

    A job whose caller is cancelled before it began never runs; one that runs already runs to its end unheard.
    """

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {num_threads}")
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="media")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` in a thread. Raises what it raises, and RuntimeError once the pool is closed."""
        job = self._threads.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(job)

    async def close(self) -> None:
        """Cancel what waits and return when what runs has ended. May be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
