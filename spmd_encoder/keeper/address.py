"""Where others reach what listens here."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress


def advertised_url(sock: socket.socket) -> str:
    """Where others reach a listening socket. One that listens on all addresses has one that leads out of here."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = _own_address(sock.family) or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address(family: int) -> str | None:
    """The address that packets to elsewhere would leave from (a UDP connect sends none)."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(("2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None
