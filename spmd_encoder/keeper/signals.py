"""SIGTERM, SIGINT and SIGHUP: the first asks for a drain, a later one for the end."""

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
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What the kernel sends when the launcher has ended. None of the above, so that it is not taken for a wish to drain.
_LAUNCHER_GONE = signal.SIGUSR2


def heeded() -> tuple[signal.Signals, ...]:
    """What a keeper obeys: not a SIGHUP that whoever started it had it ignore (nohup)."""
    return tuple(sig for sig in _SIGNALS if sig != signal.SIGHUP or signal.getsignal(sig) != signal.SIG_IGN)


def ignore_signals() -> None:
    """For a keeper's children: a signal to the whole process group is not theirs, only their keeper ends them."""
    for sig in _SIGNALS:
        signal.signal(sig, signal.SIG_IGN)


class Signals:
    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.end = asyncio.Event()
        self.received: signal.Signals | None = None
        """The signal that asked for the end; None where the launcher's own end did."""
        self._first = 0.0
        self._loop = asyncio.get_running_loop()
        self._heeded = heeded()
        for sig in self._heeded:
            self._loop.add_signal_handler(sig, self._on_signal, sig)

    def follow_launcher(self, parent: int) -> asyncio.Task[None]:
        """End when the launcher (whose pid was `parent` when this process began) has ended, however it ended."""
        self._loop.add_signal_handler(_LAUNCHER_GONE, self._on_launcher_gone)
        die_with_parent(parent, _LAUNCHER_GONE)
        return asyncio.create_task(self._watch_parent(parent), name="parent-watch")

    async def _watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(PARENT_POLL_S)
        self._on_launcher_gone()

    def _on_launcher_gone(self) -> None:
        if not self.end.is_set():
            log.warning("the launcher is gone; ending")
            self.received = None
            self.end.set()

    def close(self) -> None:
        """From here on signals are ignored: the rank is ending, and must not be cut off while it cleans up."""
        for sig in (*self._heeded, _LAUNCHER_GONE):
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
