"""What a caller gets per item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from spmd_encoder.client.arrays import ArrayKind, to_numpy, to_torch
from spmd_encoder.client.destinations import Receipt
from spmd_encoder.client.errors import BadReplyError, EncoderClientError, ItemError, ItemsFailedError
from spmd_encoder.client.safetensors import Tensor

if TYPE_CHECKING:
    import torch

Detail: TypeAlias = int | float | list[float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One item's outcome: an embedding, or `error`.

    `index` counts the call's items and `name` is the path or URL (`images[3]` where there is none). `shape` is
    `[num_tokens, dim]` or `[dim]`; `dtype` the server's, also where `embedding` is wider; `grid` is `(t, h, w)` in
    patches where the model has one; `digest` is `sha256:<hex>` of the file as sent; `replica` names the replica
    that answered, as the reply's header has it (`0,1` where the request's pictures met several).
    `modality` is `image`, `audio` or `video`; `details` are facts about the item that a language model needs, as
    `second_per_grid_ts` of a film. `np.asarray(result)` works too. `delivered` says where the embedding is, where the
    call named a destination; then it is not here.
    """

    index: int
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    grid: tuple[int, int, int] | None = None
    num_tokens: int = 0
    modality: str = ""
    details: Mapping[str, Detail] = field(default_factory=dict)
    digest: str = ""
    replica: str | None = None
    error: ItemError | None = None
    delivered: Receipt | None = None
    data: bytes = b""
    """The embedding's little-endian C-order bytes in `dtype`."""
    array_kind: ArrayKind = "numpy"

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def embedding(self) -> Any:
        """A new numpy array, or a torch tensor where the call said `as_="torch"`.

        numpy has no bfloat16: there it becomes float32, which is exact. Raises this picture's `ItemError`, and
        `EncoderClientError` where it went elsewhere.
        """
        return self.numpy() if self.array_kind == "numpy" else self.torch()

    def numpy(self) -> NDArray[np.floating[Any]]:
        """The embedding as a numpy array. Raises as `embedding` does."""
        self._check_here()
        return to_numpy(self.data, self.dtype, self.shape)

    def torch(self) -> torch.Tensor:
        """The embedding as a CPU tensor in the server's dtype. Raises as `embedding` does."""
        self._check_here()
        return to_torch(self.data, self.dtype, self.shape)

    def tensor(self) -> Tensor:
        """As it goes into a safetensors file."""
        return Tensor(self.dtype, self.shape, self.data)

    def _check_here(self) -> None:
        if self.error is not None:
            raise self.error
        if self.delivered is not None:
            raise EncoderClientError(f"the embedding of {self.name} is not here, but where `delivered` says")

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.numpy(), dtype=dtype)


def all_good(results: list[Result]) -> list[Result]:
    """Raises `ItemsFailedError` where one of them failed."""
    if any(result.error is not None for result in results):
        raise ItemsFailedError(results)
    return results


def stack(results: Sequence[Result]) -> NDArray[Any]:
    """Pooled vectors as `[n, dim]`. Raises `BadReplyError` where they are no vectors of one size."""
    if not results:
        return np.empty((0, 0), np.float32)
    if len({result.shape for result in results}) > 1 or len(results[0].shape) != 1:
        raise BadReplyError("the server gave no pooled vectors of one size")
    return np.stack([result.numpy() for result in results])
