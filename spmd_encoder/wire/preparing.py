"""Messages between a leader's worker and its preparers, over the socket pair that a preparer was started with."""

from __future__ import annotations

import msgspec

from spmd_encoder.api.types import NO_OPTIONS, Detail, ItemOptions, Modality, item_key
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import Message, TensorSpec

# worker -> preparer (the socket pair that the preparer was started with)


class Prepare(Message, frozen=True):
    """Followed by one frame of `media_bytes`, the item's file, or `is_shared`: in the memory that both see,
    where the answer belongs too if it `may_share` that."""

    digest: str
    modality: Modality
    media_bytes: int
    options: ItemOptions = NO_OPTIONS
    is_shared: bool = False
    may_share: bool = False

    @property
    def key(self) -> str:
        return item_key(self.modality, self.digest, self.options)


# preparer -> worker


class PreparerReady(Message, frozen=True):
    """It has loaded; said once, before anything else, with the descriptor of a `SharedMemory` where it can have one."""


class PreparedItem(Message, frozen=True):
    """Followed by one frame per tensor, of `tensor_bytes` each: little-endian C-order bytes. Or `is_shared`: these lie
    in the memory that both see."""

    num_tokens: int
    cost: int
    grid: tuple[int, int, int] | None
    tensors: tuple[TensorSpec, ...]
    tensor_bytes: tuple[int, ...]
    modality: Modality = Modality.IMAGE
    details: dict[str, Detail] = msgspec.field(default_factory=dict)
    is_shared: bool = False


class PrepareFailed(Message, frozen=True):
    code: ErrorCode
    message: str


FromPreparer = PreparerReady | PreparedItem | PrepareFailed
