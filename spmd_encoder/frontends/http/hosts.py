"""Which names this server may be asked by: on loopback it trusts whoever reaches it, so no foreign name may lead there.

A web page may have its own name resolved to 127.0.0.1 once it is open (DNS rebinding): to the browser this server is
then of the page's origin, and whatever the page asks is allowed. Such a request has the page's name in its Host header.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from spmd_encoder.frontends.http.errors import HttpError

_MAX_KNOWN = 64


class HostRule:
    """Allows `localhost`, `*.localhost`, addresses, and some `names`: no stranger can give these a new meaning."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._known: set[str] = set()

    def check(self, host: str | None) -> None:
        """Raises `HttpError` 421 where the value of the Host header is not allowed; there is none in HTTP/1.0."""
        if host is None or host in self._known:
            return
        if self._allows(host):
            if len(self._known) < _MAX_KNOWN:
                self._known.add(host)
        else:
            raise HttpError(
                421,
                "HOST_NOT_ALLOWED",
                "this server is not asked by the name in the Host header; --allowed-hosts allows more than localhost "
                "and addresses",
            )

    def _allows(self, host: str) -> bool:
        host = host.strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        return _address(name) is not None


def host_rule(sock: socket.socket, names: Iterable[str]) -> HostRule | None:
    """The rule of a server on `sock`, which is bound. None, which allows any name, where no names are given and it
    listens elsewhere than on loopback."""
    address = _address(str(sock.getsockname()[0]).partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    names = tuple(names)
    return HostRule(names) if names or (address is not None and address.is_loopback) else None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
