"""The front ends by name. To add one: write `frontends/<name>/` and its entry here."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Protocol, cast

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config, ServerConfig
from spmd_encoder.errors import StartupError
from spmd_encoder.frontends.base import FrontEnd
from spmd_encoder.frontends.shared import Shared


@dataclass(frozen=True, kw_only=True)
class FrontEndEntry:
    """`port` is where it is wanted, or None; `flag` sets it. `extra` installs the `packages` that it imports."""

    factory: str
    flag: str
    port: Callable[[ServerConfig], int | None]
    extra: str = ""
    packages: tuple[str, ...] = ()


FRONT_ENDS = MappingProxyType(
    {
        "http": FrontEndEntry(
            factory="spmd_encoder.frontends.http.server:HttpFrontEnd", flag="--port", port=lambda server: server.port
        ),
        "grpc": FrontEndEntry(
            factory="spmd_encoder.frontends.grpc.server:GrpcFrontEnd",
            flag="--grpc-port",
            port=lambda server: server.grpc_port,
            extra="grpc",
            packages=("grpc", "grpc_health", "grpc_reflection", "grpc_status"),
        ),
    }
)


class FrontEndFactory(Protocol):
    """How a front end is made. It takes over `sock`, which is bound and listens, and has at most `max_connections`;
    `shared` stays the caller's, and without one it makes its own."""

    def __call__(
        self,
        service: EncoderService,
        config: Config,
        sock: socket.socket,
        *,
        max_connections: int = ...,
        shared: Shared | None = None,
    ) -> FrontEnd: ...


def load_front_end(name: str) -> FrontEndFactory:
    """Import a front end only where it is used. Raises KeyError for an unknown name."""
    module, _, attribute = FRONT_ENDS[name].factory.partition(":")
    return cast(FrontEndFactory, getattr(importlib.import_module(module), attribute))


def wanted_ports(server: ServerConfig) -> dict[str, int]:
    """The port of every front end that is to be served. Raises StartupError (exit code 2) where one is not
    installed."""
    wanted = {}
    for name, entry in FRONT_ENDS.items():
        if (port := entry.port(server)) is None:
            continue
        if missing := [package for package in entry.packages if find_spec(package) is None]:
            raise StartupError(
                f"{entry.flag} needs packages that are not installed ({', '.join(missing)}): "
                f"pip install 'spmd-encoder[{entry.extra}]'",
                exit_code=2,
            )
        wanted[name] = port
    return wanted
