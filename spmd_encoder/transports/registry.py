"""The transports by their name in `--encoder-transfer-backend`. To add one: write its module, and its line here."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from spmd_encoder.sglang_flags import class_path
from spmd_encoder.transports.base import PushEndpoint, Transport
from spmd_encoder.transports.sglang_frames import ClassPath, SglangFraming
from spmd_encoder.transports.zmq_push import ZmqPush


@dataclass(frozen=True, kw_only=True)
class PushBackend:
    """`registers`: receivers name themselves by calls of their own; else the request to encode names the receiver."""

    name: str
    registers: bool


BACKENDS = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            PushBackend(name="zmq_to_scheduler", registers=True),
            PushBackend(name="zmq_to_tokenizer", registers=False),
        )
    }
)
_DEFAULT = "zmq_to_scheduler"


def push_backend(name: str) -> PushBackend:
    """The backend of that name; `auto` is the default one. Raises KeyError for an unknown name."""
    return BACKENDS[_DEFAULT if name == "auto" else name]


def load_push(embedding_class: str, *, timeout_s: float, max_peer_bytes: int) -> Transport[PushEndpoint]:
    """Messages as SGLang's receivers read them; `embedding_class` is where their class of a part lives."""
    framing = SglangFraming(ClassPath(*class_path(embedding_class)))
    return ZmqPush(framing, timeout_s=timeout_s, max_peer_bytes=max_peer_bytes)
