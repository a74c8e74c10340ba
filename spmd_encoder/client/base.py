"""What `Client` and `AsyncClient` have in common: their arguments."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping

from spmd_encoder.client.chunks import ChunkLimits
from spmd_encoder.client.flows import Flows
from spmd_encoder.client.transport import client_arguments

DEFAULT_URL = "http://127.0.0.1:30000"
_LONGEST_S = 10_000_000
"""Four months: what waits for time takes no infinity, and ends with an error of its own somewhere beyond."""


class ClientBase(ABC):
    """The arguments of both clients.

    `url`: the server's address. `timeout_s`: for one request with its retries; after 429, 503 or a connection that
    could not be made it is sent again until then, and up to five times after connections that broke. `retries`: if
    given, the most further attempts, whatever the reason. `concurrency`: the most requests at a time; after the
    first 64 more only as the first are answered, and fewer where the server refuses some, whose others wait their turn
    here within `timeout_s`, those that came first in front (with `retries=0` none waits). `limits`: pictures and
    bytes per request. `model`: if given, the server must serve it. `headers`: sent with every request,
    for example `{"authorization": "Bearer ..."}`. `verify`: as httpx has it, for https.

    Of a call's pictures at most `concurrency` requests' worth are in memory, with as many replies. Raises
    ValueError for arguments that make no sense.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 300.0,
        retries: int | None = None,
        concurrency: int = 8,
        limits: ChunkLimits | None = None,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= _LONGEST_S):
            raise ValueError(f"timeout_s must be a number of seconds above 0 and at most {_LONGEST_S:,}")
        if not (retries is None or (isinstance(retries, int) and retries >= 0)):
            raise ValueError("retries must be a whole number, at least 0, or None")
        if not (isinstance(concurrency, int) and concurrency >= 1):
            raise ValueError("concurrency must be a whole number, at least 1")
        self._flows = Flows(model=model, timeout_s=timeout_s, retries=retries)
        self._concurrency = concurrency
        self._limits = limits or ChunkLimits()
        self._arguments = client_arguments(url, headers, verify)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the driver's connection pool, from `_arguments`."""
