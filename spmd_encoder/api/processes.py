"""Child processes as whoever uses one sees it; `keeper.starter` starts them."""

from __future__ import annotations

import socket
from typing import Protocol, TypeVar

SpecT = TypeVar("SpecT", contravariant=True)


class StartedProcess(Protocol):
    """A child that was sent its specification, and our end of the socket pair between us."""

    @property
    def pid(self) -> int: ...

    @property
    def sock(self) -> socket.socket: ...

    async def wait(self) -> int:
        """Its exit code, negative for a signal."""
        ...

    def kill(self) -> None:
        """SIGKILL, which works on a stopped process too. Idempotent."""
        ...


class ProcessStarter(Protocol[SpecT]):
    """Starts children, by fork or spawn."""

    async def start(self, spec: SpecT) -> StartedProcess:
        """Raises OSError where it cannot be had."""
        ...
