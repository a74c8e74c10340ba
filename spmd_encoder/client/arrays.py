"""Embeddings' bytes as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

ArrayKind = Literal["numpy", "torch"]
_KINDS = get_args(ArrayKind)
Buffer = bytes | bytearray | memoryview

DTYPE_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8})
"""Bytes per value, by torch's name."""


def check_kind(kind: object) -> None:
    """Raises ValueError for what is no `ArrayKind`."""
    if kind not in _KINDS:
        raise ValueError(f"as_ must be one of {', '.join(_KINDS)}")


def to_numpy(data: Buffer, dtype: str, shape: Sequence[int]) -> NDArray[np.floating[Any]]:
    """A new array of little-endian C-order bytes. numpy has no bfloat16: it becomes float32, which is exact."""
    if dtype == "bfloat16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).copy()
    return values.reshape(shape)


def to_torch(data: Buffer, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A new CPU tensor in `dtype`."""
    import torch

    kind = getattr(torch, dtype)
    if not data:  # frombuffer takes no empty buffer
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(tuple(shape))
