"""Fetching media by URL, within limits and only from where the configuration allows."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

import httpcore

from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.addresses import forbidden_kind
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.media.http_fetch import HttpFetch
from spmd_encoder.media.local_file import parse_file_url, read_local_file
from spmd_encoder.media.network import Resolver, system_resolver
from spmd_encoder.media.shared_fetches import SharedFetches
from spmd_encoder.media.urls import WebUrl, canonical_host, parse_web_url
from spmd_encoder.media_flags import MediaConfig

MAX_FETCHES = 64
"""Most fetches at once in this process, so that many URLs cannot use up its file descriptors; the others wait."""

_REMOTE = re.compile(r"(?:https?|file)://", re.IGNORECASE)


def is_remote(text: str) -> bool:
    """Whether an item is a URL that `MediaFetcher.fetch` takes: http, https or file, in any case."""
    return _REMOTE.match(text) is not None


class MediaFetcher:
    """Fetches media for many callers, a bounded number at once; one per process.

    `resolve` and `ssl_context` are the system's unless given. Proxies of the environment are not used: a proxy would
    look names up itself, where they cannot be checked.
    """

    def __init__(
        self,
        config: MediaConfig,
        *,
        resolve: Resolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
        max_fetches: int = MAX_FETCHES,
    ) -> None:
        self._root = config.allowed_local_media_path
        self._max_bytes = config.media_url_max_file_size_mb * 2**20 or None
        self._timeout_s = config.media_fetch_timeout_s
        self._threads = DaemonThreads(max_fetches)
        self._slots = asyncio.Semaphore(max_fetches)
        self._http = HttpFetch(
            resolve=resolve or system_resolver(self._threads),
            # Made when it is needed: to read all authorities takes a tenth of a second.
            ssl_context=cache(httpcore.default_ssl_context) if ssl_context is None else lambda: ssl_context,
            forbidden=(lambda _: None) if config.allow_private_media_hosts else forbidden_kind,
            domains=_domains(config),
            max_bytes=self._max_bytes,
        )
        self._shared = SharedFetches()
        self._running: set[asyncio.Timeout] = set()
        self._ended = asyncio.Event()
        self._closed = False

    async def fetch(self, url: str, *, reserve: Callable[[int], None]) -> bytes:
        """The bytes behind `url`. Equal URLs at the same time are fetched once.

        `reserve(n)` is called in the event loop as n more bytes arrive, before they are kept; what it raises ends the
        fetch and is passed on. Raises `EncoderError`: INVALID_REQUEST (malformed), FETCH_FORBIDDEN, FETCH_FAILED (a
        fetch that ran out of time too), TOO_LARGE, or DRAINING after `close`. Cancelling it closes its connection,
        unless others wait for the same. Messages name the host and the reason, never the rest of the URL, which may
        hold secrets.
        """
        if self._closed:
            raise _draining()
        if url[:7].lower() == "file://":
            path, root = self._local_path(url)
            return await self._shared.fetch(path, lambda arrived: self._read_file(root, path, arrived), reserve)
        target = parse_web_url(url)
        return await self._shared.fetch(target, lambda arrived: self._get(target, arrived), reserve)

    async def close(self) -> None:
        """End all fetches, which raise DRAINING, and return when their connections are closed. May be called again."""
        self._closed = True
        for deadline in self._running:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())
        while self._running:
            self._ended.clear()
            await self._ended.wait()

    def _local_path(self, url: str) -> tuple[str, str]:
        """The file, and the folder that it must be in."""
        if self._root is None:
            raise EncoderError(
                ErrorCode.FETCH_FORBIDDEN,
                "files of the server are not read; --allowed-local-media-path would allow those of one folder",
            )
        return parse_file_url(url), self._root

    async def _read_file(self, root: str, path: str, reserve: Callable[[int], None]) -> bytes:
        work = read_local_file(root, path, max_bytes=self._max_bytes, reserve=reserve, threads=self._threads)
        return await self._within_limits("the file", work)

    async def _get(self, url: WebUrl, reserve: Callable[[int], None]) -> bytes:
        return await self._within_limits(url.host, self._http.fetch(url, reserve))

    async def _within_limits(self, name: str, work: Coroutine[Any, Any, bytes]) -> bytes:
        """`work`, once a place is free; both together within the time limit."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._running.add(deadline)
                try:
                    async with self._slots:
                        return await work
                finally:
                    self._running.discard(deadline)
                    self._ended.set()
        except TimeoutError:
            if self._closed:
                raise _draining() from None
            raise EncoderError(
                ErrorCode.FETCH_FAILED,
                f"{name}: the fetch was not done within {self._timeout_s:g} s (--media-fetch-timeout-s)",
            ) from None
        finally:
            work.close()  # it may not have been begun


def _domains(config: MediaConfig) -> frozenset[str]:
    try:
        return frozenset(map(canonical_host, config.allowed_media_domains))
    except EncoderError:
        named = ", ".join(config.allowed_media_domains)
        raise StartupError(f"--allowed-media-domains: not all of these are host names: {named}", exit_code=2) from None


def _draining() -> EncoderError:
    return EncoderError(ErrorCode.DRAINING, "the server is ending and fetches nothing more")
