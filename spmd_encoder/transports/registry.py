"""The transports by name, and SGLang's backends. To add one: write its module, its loader and its line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmd_encoder.config import Config
from spmd_encoder.sglang_flags import class_path
from spmd_encoder.transports.base import Framing, ItemParcel, Parcel, ParcelT, Transport
from spmd_encoder.transports.budget import StagedBytes
from spmd_encoder.transports.files import EmbeddingFiles, Run
from spmd_encoder.transports.item_frames import item_frames
from spmd_encoder.transports.sglang_frames import ClassPath, SglangFraming
from spmd_encoder.transports.staged import Shelf
from spmd_encoder.transports.zmq_push import ZmqPush


@dataclass(frozen=True, kw_only=True)
class PushBackend:
    """A value of `--encoder-transfer-backend`.

    `registers`: receivers name themselves by calls of their own; else the request to encode names the receiver.
    """

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


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the transports of one server share. `run` is for calls that may block."""

    budget: StagedBytes
    run: Run


def load_push(config: Config, _: Resources) -> ZmqPush[Parcel]:
    """Messages as SGLang's receivers read them."""
    return _push(SglangFraming(ClassPath(*class_path(config.sglang.sglang_embedding_class))), config)


def load_item_push(config: Config, _: Resources) -> ZmqPush[ItemParcel]:
    """Our own messages."""
    return _push(item_frames, config)


def load_files(config: Config, resources: Resources) -> EmbeddingFiles:
    """Raises ValueError without `--embedding-dir`."""
    settings, model = config.destinations, config.model
    if settings.embedding_dir is None:
        raise ValueError("no --embedding-dir")
    return EmbeddingFiles(
        Path(settings.embedding_dir),
        max_bytes=settings.embedding_dir_max_bytes,
        timeout_s=config.sglang.send_timeout_s,
        model=f"{model.model_path}@{model.revision or ''}",
        run=resources.run,
    )


def load_shelf(config: Config, resources: Resources) -> Shelf:
    return Shelf(resources.budget, keep_s=config.sglang.send_timeout_s)


TRANSPORTS: Mapping[str, Callable[[Config, Resources], Transport[Any, Any]]] = MappingProxyType(
    {"sglang": load_push, "zmq": load_item_push, "file": load_files, "staged": load_shelf}
)


def _push(framing: Framing[ParcelT], config: Config) -> ZmqPush[ParcelT]:
    return ZmqPush(
        framing,
        timeout_s=config.sglang.send_timeout_s,
        # Half for a receiver that stands still leaves half for all others.
        max_peer_bytes=config.sglang.max_staged_bytes // 2,
        allowed_hosts=config.destinations.push_allowed_hosts,
    )
