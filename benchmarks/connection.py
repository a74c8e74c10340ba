"""One kept connection to a server, for latencies of single requests: as little as possible between two looks at the
clock."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from benchmarks.load_generator.requests import stages_ms

SAFETENSORS = "application/vnd.safetensors"
RAW = "application/octet-stream"


@dataclass(frozen=True)
class Reply:
    """`seconds` is from before the first byte was sent until the last one was here."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def server_s(self) -> float:
        """The server's own time: from the request's headers to its reply."""
        return stages_ms(self.headers["server-timing"])["total"] / 1e3

    @property
    def cached(self) -> int:
        return int(self.headers.get("x-spmd-cached", 0))


class Connection:
    """Raises RuntimeError for any answer but 200."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        self._http.connect()

    def encode(self, body: bytes, content_type: str = RAW) -> Reply:
        headers = {"content-type": content_type, "accept": SAFETENSORS}
        began = time.perf_counter()
        self._http.request("POST", "/v1/encode", body, headers)
        reply = self._http.getresponse()
        got = reply.read()
        seconds = time.perf_counter() - began
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {got[:300]!r}")
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, got, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()


def tensor_bytes(body: bytes) -> bytes:
    """A safetensors body's values, without its header, which names the request."""
    return body[8 + int.from_bytes(body[:8], "little") :]
