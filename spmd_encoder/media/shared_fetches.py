"""Equal fetches at the same time are one fetch, which goes on while anybody waits for it. Nothing is kept afterwards,
neither files nor failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from spmd_encoder.errors import EncoderError

Reserve = Callable[[int], None]
Start = Callable[[Reserve], Coroutine[Any, Any, bytes]]
"""Begins a fetch that tells the bytes as they come."""


class SharedFetches:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight] = {}

    async def fetch(self, key: Hashable, start: Start, reserve: Reserve) -> bytes:
        """What `start` fetches, or what the fetch of an equal `key` does that runs already.

        `reserve` is told of all bytes, also of those that had come before this caller did; what it raises is this
        caller's failure alone. A caller that is cancelled leaves the others their fetch; with the last one it ends.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(start)
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        try:
            return await flight.wait(reserve)
        finally:
            if not flight.callers:
                self._forget(key, flight)
                await flight.end()

    def _forget(self, key: Hashable, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class _Flight:
    def __init__(self, start: Start) -> None:
        self.callers: dict[asyncio.Future[bytes], Reserve] = {}
        self._num_bytes = 0
        self.task = asyncio.create_task(start(self._arrived))
        self.task.add_done_callback(self._landed)

    async def wait(self, reserve: Reserve) -> bytes:
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.callers[waiter] = reserve
        try:
            if self._num_bytes:
                reserve(self._num_bytes)
            return await waiter
        finally:
            self.callers.pop(waiter, None)

    async def end(self) -> None:
        """Return when its connection is closed."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def _arrived(self, num_bytes: int) -> None:
        """Raises the last caller's failure where nobody is left."""
        self._num_bytes += num_bytes
        for waiter, reserve in list(self.callers.items()):
            if waiter.done():  # it has gone
                continue
            try:
                reserve(num_bytes)
            except EncoderError as error:
                del self.callers[waiter]
                if not self.callers:
                    self.callers[waiter] = reserve  # it is told when the fetch has ended
                    raise
                waiter.set_exception(error)

    def _landed(self, task: asyncio.Task[bytes]) -> None:
        error = None if task.cancelled() else task.exception()
        for waiter in self.callers:
            if waiter.done():
                continue
            if task.cancelled():
                waiter.cancel()
            elif error is None:
                waiter.set_result(task.result())
            else:
                # Each its own: an exception that is raised in several places gathers all their frames.
                waiter.set_exception(error.again() if isinstance(error, EncoderError) else error)
