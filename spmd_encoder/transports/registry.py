"""The transports by name, and SGLang's backends. To add one: write its module, its loader and its line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spmd_encoder.api.processes import ProcessStarter
from spmd_encoder.config import Config
from spmd_encoder.sglang_flags import class_path
from spmd_encoder.transports.base import Framing, ItemParcel, Parcel, ParcelT, Run, Transport
from spmd_encoder.transports.budget import StagedBytes
from spmd_encoder.transports.files import EmbeddingFiles
from spmd_encoder.transports.item_frames import item_frames
from spmd_encoder.transports.memory_writer import MemoryWriter
from spmd_encoder.transports.mooncake import MemoryPush
from spmd_encoder.transports.sglang_frames import ClassPath, SglangFraming
from spmd_encoder.transports.staged import Shelf
from spmd_encoder.transports.zmq_push import ZmqPush
from spmd_encoder.wire.messages import ChildSpec, WriterSpec


@dataclass(frozen=True, kw_only=True)
class PushBackend:
    """A value of `--encoder-transfer-backend`.

    `registers`: receivers name themselves by calls of their own; else the request to encode names the receiver.
    `is_fetched`: each receiver asks for the rows when it has room for them.
    """

    name: str
    registers: bool
    is_fetched: bool = False


BACKENDS = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            PushBackend(name="zmq_to_scheduler", registers=True),
            PushBackend(name="zmq_to_tokenizer", registers=False),
            PushBackend(name="mooncake", registers=False, is_fetched=True),
        )
    }
)
_DEFAULT = "zmq_to_scheduler"


def push_backend(name: str) -> PushBackend:
    """The backend of that name; `auto` is the default one. Raises KeyError for an unknown name."""
    return BACKENDS[_DEFAULT if name == "auto" else name]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What the transports of one server share. `run` is for calls that may block, `run_look_ups` for those that ask for
    a host's addresses, `writer` is `load_writer`'s."""

    budget: StagedBytes
    run: Run
    run_look_ups: Run
    writer: MemoryWriter | None = None


def load_writer(config: Config, starter: ProcessStarter[ChildSpec], host: str) -> MemoryWriter | None:
    """What writes into receivers' memory, not started yet; None where the backend needs none. `host` is this server's
    address as others see it."""
    settings = config.sglang
    if not push_backend(settings.encoder_transfer_backend).is_fetched:
        return None
    device = settings.mooncake_ib_device or ""
    return MemoryWriter(starter, WriterSpec(host=host, protocol=settings.mooncake_protocol, device=device))


def load_push(config: Config, resources: Resources) -> ZmqPush[Parcel]:
    """Messages as SGLang's receivers read them."""
    return _push(SglangFraming(ClassPath(*class_path(config.sglang.sglang_embedding_class))), config, resources)


def load_memory_push(config: Config, resources: Resources) -> MemoryPush:
    """Rows in memory that SGLang's receivers have named; it closes the writer. Raises ValueError without one."""
    if resources.writer is None:
        raise ValueError("no process that writes")
    return MemoryPush(resources.writer, load_push(config, resources), timeout_s=config.sglang.send_timeout_s)


def load_backend(config: Config, resources: Resources) -> Transport[Parcel, Any]:
    """What `--encoder-transfer-backend` names."""
    load = load_memory_push if push_backend(config.sglang.encoder_transfer_backend).is_fetched else load_push
    return load(config, resources)


def load_item_push(config: Config, resources: Resources) -> ZmqPush[ItemParcel]:
    """Our own messages."""
    return _push(item_frames, config, resources)


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
    {
        "sglang": load_push,
        "mooncake": load_memory_push,
        "zmq": load_item_push,
        "file": load_files,
        "staged": load_shelf,
    }
)


def _push(framing: Framing[ParcelT], config: Config, resources: Resources) -> ZmqPush[ParcelT]:
    return ZmqPush(
        framing,
        timeout_s=config.sglang.send_timeout_s,
        # Half for a receiver that stands still leaves half for all others.
        max_peer_bytes=config.sglang.max_staged_bytes // 2,
        allowed_hosts=config.destinations.push_allowed_hosts,
        run_look_ups=resources.run_look_ups,
    )
