"""SGLang's push message: frame 0 tells what frame 1 holds, frame 1 is the rows.

Frame 0 is a pickle, since SGLang's receivers read nothing else. It is written opcode by opcode (protocol 2, as
`pickletools` documents them): no object is ever pickled, neither sglang nor torch is imported, and nothing here can
read a pickle. What the receiver builds from it is one object of its own class with these attributes and no other
code run: class, `dtype`, `modality` and `torch.LongTensor`, which holds the lengths of sounds, are names that its
allow-list knows.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spmd_encoder.api.types import Modality
from spmd_encoder.transports.base import Buffer, Parcel, ParcelHeader

Plain = None | bool | int | float | str | Sequence["Plain"]

# What models tell of items, by which a receiver lays out its prompt; `Embedding.details` has the names.
_LENGTH, _TIMES = "audio_feature_length", "timestamps"
_SECONDS_PER_LAYER = ("second_per_grid_ts", "video_second_per_grid")  # as Qwen2.5-VL and Qwen-Omni call them

# The name under which both old and new receivers let `Modality` in.
_MODALITY = b"csglang.srt.managers.schedule_batch\nModality\n"
_MODALITY_VALUE = MappingProxyType({Modality.IMAGE: 1, Modality.VIDEO: 2, Modality.AUDIO: 3})
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,30}")

_PROTO, _STOP = b"\x80\x02", b"."
_EMPTY_TUPLE, _NEWOBJ, _REDUCE, _BUILD = b")", b"\x81", b"R", b"b"
_EMPTY_DICT, _MARK, _SETITEMS = b"}", b"(", b"u"
_EMPTY_LIST, _APPENDS = b"]", b"e"
_NONE, _TRUE, _FALSE, _TUPLE1 = b"N", b"\x88", b"\x89", b"\x85"


@dataclass(frozen=True)
class ClassPath:
    """Where the receiver's class of parts lives; it moved between SGLang's releases."""

    module: str
    name: str


class SglangFraming:
    """A parcel as SGLang's `EmbeddingData` message; an error, and rows that went another way, have frame 0 alone."""

    def __init__(self, embedding_class: ClassPath) -> None:
        self._class = _global(embedding_class.module, embedding_class.name)

    def __call__(self, parcel: Parcel) -> list[Buffer]:
        head = self._head(parcel)
        if not parcel.chunks:
            return [head]
        # A message's frame is one buffer. The rows of several items come from several replicas.
        return [head, parcel.chunks[0] if len(parcel.chunks) == 1 else b"".join(parcel.chunks)]

    def _head(self, parcel: Parcel) -> bytes:
        header, error = parcel.header, parcel.error
        modality = _MODALITY + _value(_MODALITY_VALUE[header.modality]) + _TUPLE1 + _REDUCE
        attributes: list[tuple[str, bytes]] = [
            ("req_id", _value(header.part_id)),
            ("num_parts", _value(header.num_parts)),
            ("part_idx", _value(header.part_idx)),
            ("grid_dim", _grids(header) if error is None else _NONE),
            ("modality", modality),
            ("embedding", _NONE),
            ("send_time", _NONE),
            ("dtype", _NONE if error is not None else _torch_dtype(header.dtype)),
            ("shape", _value([header.rows, header.dim] if error is None else None)),
            ("_mr_ptr", _NONE),
            ("error_msg", _value(None if error is None else error.message)),
            ("error_code", _value(None if error is None else error.status)),
            ("video_timestamps", _of_films(header, _TIMES)),
            ("second_per_grid_ts", _of_films(header, *_SECONDS_PER_LAYER)),
        ]
        items = b"".join(_value(name) + value for name, value in attributes)
        empty = self._class + _EMPTY_TUPLE + _NEWOBJ
        return _PROTO + empty + _EMPTY_DICT + _MARK + items + _SETITEMS + _BUILD + _STOP


def _grids(header: ParcelHeader) -> bytes:
    """`[items, 3]` as a list; of sounds a tensor `[items]` of lengths in frames of features."""
    if header.modality is not Modality.AUDIO:
        return _value(header.grids)
    # A sound whose model does not tell has its number of rows, which stands in its grid.
    lengths = [details.get(_LENGTH, grid[-1]) for details, grid in zip(header.details, header.grids, strict=True)]
    return _global("torch", "LongTensor") + _value(lengths) + _TUPLE1 + _REDUCE


def _of_films(header: ParcelHeader, *names: str) -> bytes:
    """A list with each film's value, where the model tells it of all, by one of the names."""
    told = [details[name] for details in header.details for name in names if name in details]
    is_told = header.modality is Modality.VIDEO and told and len(told) == len(header.grids)
    return _value(told if is_told else None)


def _torch_dtype(name: str) -> bytes:
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype of torch")
    return _global("torch", name)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode("ascii")


def _value(value: Plain) -> bytes:
    """The opcodes that put one plain value on the stack; no memo is used, so that they can be joined."""
    match value:
        case None:
            return _NONE
        case bool():
            return _TRUE if value else _FALSE
        case int():
            if -(2**31) <= value < 2**31:
                return b"J" + struct.pack("<i", value)
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(raw)]) + raw
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            raw = value.encode("utf-8", errors="replace")
            return b"X" + struct.pack("<I", len(raw)) + raw
        case _:
            return _EMPTY_LIST + _MARK + b"".join(map(_value, value)) + _APPENDS
