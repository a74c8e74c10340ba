"""Tells language servers' bootstraps of this encoder while it takes requests, and of its end.

A bootstrap forgets: it may be restarted, and it drops an encoder that missed some probes. So it is told again and
again, which changes nothing where it knows already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import httpx

from spmd_encoder.api.types import ReadyState
from spmd_encoder.frontends.base import is_ready

log = logging.getLogger(__name__)

REPEAT_S = 30.0
RETRY_S = 5.0
_LOOK_S = 0.5
_REQUEST_S = 5.0
_FAREWELL_S = 2.0


class Registration:
    """Keeps `url` registered with every bootstrap on its own, so that one that is slow or gone delays no other."""

    def __init__(
        self,
        bootstraps: Sequence[str],
        url: str,
        state: Callable[[], ReadyState],
        *,
        repeat_s: float = REPEAT_S,
        retry_s: float = RETRY_S,
        look_s: float = _LOOK_S,
    ) -> None:
        self._url = url
        self._state = state
        self._repeat_s = repeat_s
        self._retry_s = retry_s
        self._look_s = look_s
        # Language servers are neighbours: no proxies.
        self._http = httpx.AsyncClient(timeout=_REQUEST_S, trust_env=False)
        self._tasks = [asyncio.create_task(self._keep(bootstrap.rstrip("/"))) for bootstrap in bootstraps]

    async def close(self) -> None:
        """Take it back everywhere, if draining has not done so already. May be called again."""
        for task in self._tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def _keep(self, bootstrap: str) -> None:
        is_known: bool | None = None
        try:
            while not self._state().draining:
                if is_ready(self._state()):
                    is_known = await self._register(bootstrap, is_known)
                    await self._pause(self._repeat_s if is_known else self._retry_s)
                else:
                    await asyncio.sleep(self._look_s)
        finally:
            if is_known:
                await self._unregister(bootstrap)

    async def _pause(self, seconds: float) -> None:
        """Ends early when the server drains."""
        end = asyncio.get_running_loop().time() + seconds
        while not self._state().draining and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(self._look_s)

    async def _register(self, bootstrap: str, was_known: bool | None) -> bool:
        """Whether it took it. Only changes are logged, so that a bootstrap that is away for hours fills no log."""
        why = await self._call("POST", f"{bootstrap}/register_encoder_url")
        if why is None:
            log.log(logging.DEBUG if was_known else logging.INFO, "registered %s with %s", self._url, bootstrap)
            return True
        level = logging.DEBUG if was_known is False else logging.WARNING
        log.log(level, "%s does not take the registration of %s: %s", bootstrap, self._url, why)
        return False

    async def _unregister(self, bootstrap: str) -> None:
        why = await self._call("DELETE", f"{bootstrap}/unregister_encoder_url")
        log.info("unregistered from %s%s", bootstrap, f", which fails: {why}" if why else "")

    async def _call(self, method: str, url: str) -> str | None:
        """Why it failed."""
        try:
            reply = await self._http.request(method, url, json={"url": self._url})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return str(error) or type(error).__name__
        return None if reply.status_code == 200 else f"status {reply.status_code}"
