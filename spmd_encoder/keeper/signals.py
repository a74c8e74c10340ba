"""SIGTERM and SIGINT: the first asks for a drain, a later one for the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from spmd_encoder.keeper.fate import die_with_parent

log = logging.getLogger(__name__)

# A launcher that is signalled together with us (scancel, Ctrl-C, a process group) forwards the same signal again.
ECHO_S = 2.0
PARENT_POLL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.end = asyncio.Event()
        self.received: signal.Signals | None = None
        self._first = 0.0
        self._parent = os.getppid()
        self._loop = asyncio.get_running_loop()
        for sig in _SIGNALS:
            self._loop.add_signal_handler(sig, self._on_signal, sig)

    def follow_launcher(self) -> asyncio.Task[None]:
        """End when the launcher has ended, however it ended."""
        die_with_parent(self._parent, signal.SIGTERM)
        return asyncio.create_task(self._watch_parent(), name="parent-watch")

    async def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            await asyncio.sleep(PARENT_POLL_S)
        log.warning("the launcher is gone; ending")
        self.end.set()

    def close(self) -> None:
        """From here on signals are ignored: the rank is ending, and must not be cut off while it cleans up."""
        for sig in _SIGNALS:
            self._loop.remove_signal_handler(sig)
            signal.signal(sig, signal.SIG_IGN)

    def _on_signal(self, sig: signal.Signals) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._first = sig, now
            self.drain.set()
        elif now - self._first > ECHO_S:
            log.warning("a second signal: ending at once")
            self.end.set()
        if os.getppid() != self._parent:
            self.end.set()
