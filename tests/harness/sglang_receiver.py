"""SGLang's side of the wire for tests: real PULL sockets, and an unpickler that knows a handful of names only."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

NUMPY = {"float32": np.float32, "float16": np.float16}


class Modality(Enum):
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class EmbeddingData:
    """Stands in for the receiver's class; the wire fills its `__dict__`."""

    req_id: str
    num_parts: int
    part_idx: int
    grid_dim: Any
    modality: Modality
    embedding: None
    dtype: str | None
    shape: list[int] | None
    error_msg: str | None
    error_code: int | None


CURRENT = "sglang.srt.disaggregation.encoder.receiver"
OLDER = "sglang.srt.disaggregation.encode_receiver"


@dataclass(frozen=True)
class LongTensor:
    """Stands in for torch's, made of a list."""

    values: list[int]


ALLOWED: dict[tuple[str, str], Any] = {
    (CURRENT, "EmbeddingData"): EmbeddingData,
    (OLDER, "EmbeddingData"): EmbeddingData,
    ("sglang.srt.managers.schedule_batch", "Modality"): Modality,
    ("sglang.srt.multimodal.modality", "Modality"): Modality,
    ("torch", "LongTensor"): LongTensor,
    **{("torch", name): name for name in ("float32", "float16", "bfloat16")},
}


class _Unpickler(pickle.Unpickler):
    allowed = ALLOWED

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return self.allowed[module, name]


def read_head(frame: bytes, real: Mapping[tuple[str, str], Any] = MappingProxyType({})) -> EmbeddingData:
    """`real` has classes to be taken instead of what stands in for them."""
    unpickler = _Unpickler(io.BytesIO(frame))
    unpickler.allowed = {**ALLOWED, **real}
    found = unpickler.load()
    assert isinstance(found, EmbeddingData)
    return found


@dataclass
class Message:
    head: EmbeddingData
    rows: bytes | None

    def values(self) -> np.ndarray[Any, Any]:
        """Frame 1 as the receiver reads it: exactly `shape` values of `dtype`, as float32."""
        head = self.head
        assert self.rows is not None and head.shape is not None and head.dtype is not None
        if head.dtype == "bfloat16":
            return (np.frombuffer(self.rows, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(head.shape)
        return np.frombuffer(self.rows, NUMPY[head.dtype]).astype(np.float32).reshape(head.shape)


@dataclass
class Receiver:
    """One scheduler rank, or one tokenizer's request: a PULL socket on a port of its own."""

    host: str = "127.0.0.1"
    port: int = 0
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)

    def __post_init__(self) -> None:
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.IPV6, int(":" in self.host))
        self.socket.setsockopt(zmq.RCVHWM, 0)
        place = f"tcp://[{self.host}]" if ":" in self.host else f"tcp://{self.host}"
        if self.port:
            self.socket.bind(f"{place}:{self.port}")
        else:
            self.port = self.socket.bind_to_random_port(place)

    @property
    def url(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def message(self) -> Message:
        head, *rows = await self.socket.recv_multipart()
        assert len(rows) <= 1
        return Message(read_head(head), rows[0] if rows else None)

    async def nothing_more(self, wait_ms: int = 100) -> bool:
        return not await self.socket.poll(wait_ms)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.destroy(linger=0)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()
