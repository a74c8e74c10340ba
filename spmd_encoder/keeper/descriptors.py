"""File descriptors: as many as this user may have, and enough of them kept from strangers for ourselves."""

from __future__ import annotations

import resource

WANTED = 65536
RESERVED = 512
"""For sockets between our own processes, pipes, files and fetches: never given to HTTP clients."""


def raise_limit() -> None:
    """The soft limit up to the hard one. Desktop systems start with 1024, which a thousand idle clients use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """How many HTTP connections may be open at once: all descriptors but the reserved, or half where they are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED
    return max(soft - RESERVED, soft // 2)
