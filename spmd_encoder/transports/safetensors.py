"""Embeddings as a safetensors file, in their dtype (bfloat16 too) and without a copy.

The format (https://github.com/huggingface/safetensors): eight bytes with the little-endian length of a JSON header, the
header, then the tensors' bytes without gaps. Written here because the library joins all bytes into a copy, and knows
bfloat16 only with torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from spmd_encoder.api.types import Embedding
from spmd_encoder.errors import EncoderError, ErrorCode

ITEM_KEY = "item"
# The data start at a multiple of this, as the library writes them.
_ALIGNMENT = 8
# (name in the format, bytes per value) by torch's name
_DTYPES = MappingProxyType(
    {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float64": ("F64", 8)}
)


class SafetensorsWriter:
    """Collects tensors by name; equal tensors in equal order with equal metadata give equal bytes."""

    def __init__(self) -> None:
        self._header: dict[str, Any] = {}
        self._parts: list[memoryview] = []
        self._end = 0

    def add(self, name: str, embedding: Embedding) -> None:
        """Raises `EncoderError` INTERNAL where a reader could not make an array of it; it is left out then."""
        data = memoryview(embedding.data).cast("B")
        self._header[name] = {
            "dtype": _dtype(embedding, len(data)),
            "shape": embedding.shape,
            "data_offsets": (self._end, self._end + len(data)),
        }
        self._parts.append(data)
        self._end += len(data)

    def finish(self, metadata: Mapping[str, str]) -> tuple[memoryview, ...]:
        """The file's bytes: its head, then every tensor's."""
        text = msgspec.json.encode({**self._header, "__metadata__": metadata})
        text += b" " * (-len(text) % _ALIGNMENT)
        return memoryview(len(text).to_bytes(8, "little") + text), *self._parts


def about(embedding: Embedding) -> dict[str, str]:
    """Metadata of a file of one item: all that a reply says of it, as JSON, so that its rows can be used without that
    reply. A language model needs `grid` and `details` beside them."""
    said = {
        "modality": embedding.modality.value,
        "kind": embedding.kind.value,
        "shape": embedding.shape,
        "dtype": embedding.dtype,
        "grid": embedding.grid,
        "num_tokens": embedding.num_tokens,
        "digest": embedding.digest,
        "details": embedding.details,
    }
    return {ITEM_KEY: msgspec.json.encode(said).decode()}


def _dtype(embedding: Embedding, num_bytes: int) -> str:
    name, size = _DTYPES.get(embedding.dtype, ("", 0))
    if num_bytes != math.prod(embedding.shape) * size or not size:
        raise EncoderError(ErrorCode.INTERNAL, f"an embedding in {embedding.dtype} cannot be written as safetensors")
    return name
