"""Flags of the ways that embeddings take besides the reply."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_encoder.errors import StartupError
from spmd_encoder.flags import flag


@dataclass(frozen=True, kw_only=True)
class DestinationConfig:
    embedding_dir: str | None = flag(
        None,
        "folder for embeddings as files, `<folder>/<mm_hash>/encoder_cache.safetensors`, for requests with the "
        "destination `file`, which is refused without it; whatever is in it counts and may be removed",
    )
    embedding_dir_max_bytes: int = flag(
        16 * 2**30, "most bytes of files in that folder; those that were not delivered for longest go first"
    )
    push_allowed_hosts: tuple[str, ...] = flag(
        (),
        "exact names or addresses of the hosts that embeddings are pushed to, SGLang's receivers too, separated by "
        "commas or spaces; empty allows any host, so whoever may send requests can make this server connect to it",
    )


def check_hosts(hosts: tuple[str, ...]) -> None:
    """Raises StartupError (exit code 2) for what is no host."""
    for host in hosts:
        if set(host) & set("/*@?#[]\\") or host.count(":") == 1:
            raise StartupError(
                f"--push-allowed-hosts takes exact names or addresses, not {host!r}: no scheme, port or wildcard",
                exit_code=2,
            )
