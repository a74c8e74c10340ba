"""Looking names up, and connecting to the addresses that were checked and to no other."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from ipaddress import ip_address

import httpcore

from spmd_encoder.media.addresses import Address
from spmd_encoder.media.daemon_threads import DaemonThreads

CONNECT_TIMEOUT_S = 5.0
"""For each address that is tried, and for TLS with it."""

Resolver = Callable[[str, int], Awaitable[Sequence[Address]]]
"""The addresses of a host name for a port. Raises OSError where there are none."""


def system_resolver(threads: DaemonThreads) -> Resolver:
    """Names as the system looks them up (hosts file, DNS)."""

    async def resolve(host: str, port: int) -> Sequence[Address]:
        found = await threads.run(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))

    return resolve


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to the given addresses only, whatever host it is asked for; the first that answers is taken.

    The host stays what TLS verifies and what the Host header says.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._network = httpcore.AnyIOBackend()
        self._stream: httpcore.AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 the base class has it
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError()
        for address in self._addresses:
            try:
                self._stream = await self._network.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return self._stream
        raise failure

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


def why_not_connected(error: Exception) -> str:
    """What a `ConnectError` or `ConnectTimeout` of httpcore came from, in words."""
    if isinstance(error, httpcore.ConnectTimeout):
        return f"it did not accept a connection within {CONNECT_TIMEOUT_S:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its TLS certificate is not valid for it ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return "TLS with it failed"
        cause = cause.__cause__ or cause.__context__
    return "it accepts no connection"
