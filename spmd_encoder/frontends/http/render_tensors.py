"""From outcomes to a safetensors body: the embeddings as they are, and the rest of the JSON reply in its metadata.

The format (https://github.com/huggingface/safetensors): eight bytes with the little-endian length of a JSON header, the
header, then the tensors' bytes without gaps. Written here because the library joins all bytes into a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from spmd_encoder.api.types import Embedding, ItemOutcome
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.render import Rendered, Text, render_entries

MEDIA_TYPE = "application/vnd.safetensors"
RESPONSE_KEY = "response"
# The data start at a multiple of this, as the library writes them.
_ALIGNMENT = 8
# (name in the format, bytes per value) by torch's name
_DTYPES = MappingProxyType(
    {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float64": ("F64", 8)}
)


def render_safetensors(request_id: str, model: str, outcomes: Sequence[ItemOutcome]) -> Rendered:
    """Tensor `"<index>"` for each good item, in its dtype; `__metadata__` has the JSON reply without `embedding` under
    the key `response`. Where every item failed, the JSON reply itself. Copies no embedding."""
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    end = 0

    def add(index: int, embedding: Embedding) -> Text:
        nonlocal end
        data = memoryview(embedding.data).cast("B")
        header[str(index)] = {
            "dtype": _dtype(embedding, len(data)),
            "shape": embedding.shape,
            "data_offsets": (end, end + len(data)),
        }
        parts.append(data)
        end += len(data)
        return msgspec.UNSET

    reply, is_any_good = render_entries(request_id, model, outcomes, add)
    if not is_any_good:
        return reply
    header["__metadata__"] = {RESPONSE_KEY: str(reply.body[0], "utf-8")}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return Rendered(200, (memoryview(head), *parts), media_type=MEDIA_TYPE)


def _dtype(embedding: Embedding, num_bytes: int) -> str:
    """Raises `EncoderError` INTERNAL where a reader could not make an array of it."""
    name, size = _DTYPES.get(embedding.dtype, ("", 0))
    if num_bytes != math.prod(embedding.shape) * size or not size:
        raise EncoderError(ErrorCode.INTERNAL, f"an embedding in {embedding.dtype} cannot be written as safetensors")
    return name
