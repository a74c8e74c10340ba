"""The front ends by name. To add one: write `frontends/<name>/` and its line here."""

from __future__ import annotations

import importlib
import socket
from types import MappingProxyType
from typing import Protocol, cast

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.frontends.base import FrontEnd

FRONT_ENDS = MappingProxyType(
    {
        "http": "spmd_encoder.frontends.http.server:HttpFrontEnd",
    }
)


class FrontEndFactory(Protocol):
    """How a front end is made. It takes over `sock`, which is bound and listens, and has at most `max_connections`."""

    def __call__(
        self, service: EncoderService, config: Config, sock: socket.socket, *, max_connections: int
    ) -> FrontEnd: ...


def load_front_end(name: str) -> FrontEndFactory:
    """Import a front end only where it is used. Raises KeyError for an unknown name."""
    module, _, attribute = FRONT_ENDS[name].partition(":")
    return cast(FrontEndFactory, getattr(importlib.import_module(module), attribute))
