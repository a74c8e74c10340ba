"""The vocabulary between front ends and the runtime: requests, items, results. No torch, no sockets."""

from __future__ import annotations

import dataclasses
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


Detail = int | float | list[float]
"""A fact about an item besides its rows and grid, as `Embedding.details` names it."""


@dataclass(frozen=True, kw_only=True)
class ItemOptions:
    """How one film is sampled. None is the model's own way; the server's limits hold in any case."""

    fps: float | None = None
    max_frames: int | None = None


NO_OPTIONS = ItemOptions()


@dataclass(frozen=True, kw_only=True)
class MediaItem:
    """One picture, sound or film as it came: undecoded file bytes.

    `digest` is `sha256:<hex>` of exactly these bytes. `width` and `height` (pixels) and `seconds` come from the file's
    header, before any decoding, 0 where it does not tell; so do the `frames` of a film that is a list of pictures, all
    of which are encoded. They price the item (`api.cost`).
    """

    modality: Modality
    data: bytes
    digest: str
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    frames: int = 0
    options: ItemOptions = NO_OPTIONS
    held: bool = False
    """Its digest is all that came: `data` is empty, and its result comes out of a cache or not at all (NOT_FOUND)."""

    @property
    def key(self) -> str:
        return item_key(self.modality, self.digest, self.options)


def item_key(modality: Modality, digest: str, options: ItemOptions) -> str:
    """Equal for items whose results are equal: a picture's digest; otherwise also how the bytes are to be read."""
    if modality is Modality.IMAGE:
        return digest
    given = [f"{name}={value!r}" for name, value in dataclasses.asdict(options).items() if value is not None]
    return f"{digest}?" + "&".join([modality.value, *given])


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
    """Seconds that one item spent in each stage. `queue_s`: in the dispatcher and on the replica; `transfer_s`: on its
    way to the replica and back."""

    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    transfer_s: float = 0.0


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
    details: dict[str, Detail] = field(default_factory=dict)
    """What else a language model must know of it, under the names of transformers' processors: for example
    `second_per_grid_ts` of a film."""
    cached: bool = False
    """It came out of the replica's cache, bit for bit as it was computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldResult:
    """A result that caches hold, without its data. `replicas` are those that hold it, the last to give it at the
    end."""

    kind: OutputKind
    shape: tuple[int, ...]
    dtype: str
    num_tokens: int
    grid: tuple[int, int, int] | None
    replicas: tuple[int, ...] = ()


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
