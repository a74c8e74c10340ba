"""The safetensors format by hand, without torch: a checked reader of replies, a writer that keeps bfloat16.

A file is the header's length (8 bytes, little-endian), the header (JSON: a tensor's dtype, shape and byte range by
name, text under `__metadata__`), and the data. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from spmd_encoder.client.errors import BadReplyError
from spmd_encoder.client.files import written_whole

# As the format's own library has it.
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _NAMES.items()}


@dataclass(frozen=True)
class Tensor:
    """`data` holds little-endian C-order bytes of `shape` in `dtype` (torch's name of a float type)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse(body: bytes | bytearray | memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (views of `body`) and the metadata.

    Raises `BadReplyError` for whatever is damaged: every length, range and size is checked, the ranges must cover
    the data without overlap and without a hole, and only float types are taken.
    """
    view = memoryview(body)
    if len(view) < 8:
        raise _damaged(f"{len(view)} bytes are too few")
    length = int.from_bytes(view[:8], "little")
    if length > min(_MAX_HEADER_BYTES, len(view) - 8):
        raise _damaged("the header's length is larger than the body")
    entries, metadata = _header(view[8 : 8 + length])
    data = view[8 + length :]
    end = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        begin, stop = entry.data_offsets
        if begin != end or not begin <= stop <= len(data):
            raise _damaged(f"the byte range of tensor {name[:40]!r} overlaps another, leaves a hole or ends outside")
        if entry.dtype not in _SIZES:
            raise _damaged(f"tensor {name[:40]!r} has the dtype {entry.dtype[:20]!r}, which is no float type")
        if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * _SIZES[entry.dtype] != stop - begin:
            raise _damaged(f"the shape of tensor {name[:40]!r} does not fit its number of bytes")
        end = stop
    if end != len(data):
        raise _damaged(f"{len(data) - end} bytes at the end belong to no tensor")
    tensors = {
        name: Tensor(_NAMES[entry.dtype], tuple(entry.shape), data[slice(*entry.data_offsets)])
        for name, entry in entries.items()
    }
    return tensors, metadata


def _header(raw: memoryview) -> tuple[dict[str, _Entry], dict[str, str]]:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(fields.pop(_METADATA, b"{}"), type=dict[str, str])
        return {name: msgspec.json.decode(field, type=_Entry) for name, field in fields.items()}, metadata
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _damaged(f"its header is not as it should be ({str(error)[:200]})") from None


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file as a whole or not at all. Raises `WriteError`."""
    header: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # readers map the file and want the data aligned
    with written_whole(path) as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            out.write(tensor.data)


def _damaged(what: str) -> BadReplyError:
    return BadReplyError(f"the reply is no valid safetensors body: {what}")
