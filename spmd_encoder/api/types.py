"""The vocabulary between front ends and the runtime: requests, items, results. No torch, no sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from spmd_encoder.errors import EncoderError


class Modality(StrEnum):
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


class OutputKind(StrEnum):
    """`tokens` is `[num_tokens, dim]`, one row per placeholder of the language model; `pooled` is `[dim]`."""

    TOKENS = "tokens"
    POOLED = "pooled"


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One picture as it came: undecoded file bytes.

    `digest` is `sha256:<hex>` of exactly these bytes. `width` and `height` (pixels) come from the file's
    header, before any decoding; they price the item (`api.cost`).
    """

    modality: Modality
    data: bytes
    digest: str
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class EncodeRequest:
    """`deadline_s` is the time from now after which the caller wants no result any more."""

    request_id: str
    items: tuple[MediaItem, ...]
    output: OutputKind | None = None
    deadline_s: float | None = None
    probe: bool = False


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds that one item spent in each stage on the replica."""

    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """One item's result. `data` holds little-endian C-order bytes of `shape` in `dtype` (torch's name)."""

    modality: Modality
    kind: OutputKind
    shape: tuple[int, ...]
    dtype: str
    num_tokens: int
    digest: str
    data: bytes | memoryview
    grid: tuple[int, int, int] | None = None
    replica: int = -1
    times: StageTimes = field(default_factory=StageTimes)
    cached: bool = False
    """It came out of the replica's cache, bit for bit as it was computed."""


@dataclass(frozen=True, kw_only=True)
class ItemFailure:
    """One item's failure. `replica` is the one that reported it, or None where none was asked."""

    error: EncoderError
    replica: int | None = None


ItemOutcome = Embedding | ItemFailure


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is served. `embedding_dims` has the last dimension of each output. `max_pixels` etc. live in `CostTable`."""

    name: str
    family: str
    model_type: str
    dtype: str
    outputs: tuple[OutputKind, ...]
    default_output: OutputKind
    modalities: tuple[Modality, ...]
    embedding_dims: dict[OutputKind, int]
    random_weights: bool
    revision: str | None = None

    @property
    def embedding_dim(self) -> int:
        """The last dimension of the default output."""
        return self.embedding_dims[self.default_output]


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """One process of the world, as `/info` shows it. `role`: keeper, worker, preparer, nursery."""

    rank: int
    dp_rank: int
    tp_rank: int
    role: str
    pid: int
    epoch: int | None
    preloaded: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ReadyState:
    """`ready`: the service takes requests now. `started`: all replicas were up once, or the start deadline passed."""

    ready: bool
    started: bool
    draining: bool
    replicas_ready: int
    replicas: int
