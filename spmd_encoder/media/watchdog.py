"""The time that a process has for an item: what is longer at one than that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spmd_encoder.api.processes import StartedProcess

GRACE_S = 1.0
"""For an answer that is here when its time is over, to be read."""


class Watchdog:
    """Watches one process, item after item. `has_news` says whether it has answered, and nobody has read it yet;
    `cpu_seconds` tells its time on processors.

    `has_killed` is set where the present item was too long, and `cpu_s` is what that item had of processors, None where
    the system does not tell.
    """

    def __init__(
        self,
        process: StartedProcess,
        timeout_s: float,
        *,
        has_news: Callable[[], bool],
        cpu_seconds: Callable[[int], float | None],
    ) -> None:
        self._process = process
        self._timeout_s = timeout_s
        self._has_news = has_news
        self._cpu_seconds = cpu_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_on = self._is_grace = False
        self._deadline = 0.0
        self._before: float | None = None
        self.has_killed = False
        self.cpu_s: float | None = None

    def begin(self) -> None:
        """An item begins."""
        self._is_on, self._is_grace = True, False
        self._before = self._cpu_seconds(self._process.pid)
        self._deadline = self._loop.time() + self._timeout_s
        # One timer for many items: it looks at the deadline of the item that is under way when it is due.
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._look)

    def end(self) -> None:
        """The item is over."""
        self._is_on = False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._is_on:
            return
        if self._loop.time() >= self._deadline:
            if self._is_grace or not self._has_news():
                self._kill()
                return
            self._is_grace = True  # this loop itself stood still
            self._deadline += GRACE_S
        self._timer = self._loop.call_at(self._deadline, self._look)

    def _kill(self) -> None:
        after = self._cpu_seconds(self._process.pid)
        self.cpu_s = None if self._before is None or after is None else after - self._before
        self.has_killed = True
        self._process.kill()
