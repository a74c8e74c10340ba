"""Messages to bytes and back: msgpack of tagged structs. A frame that does not fit raises `WireError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from spmd_encoder.wire.messages import Message

M = TypeVar("M")


class WireError(ValueError):
    """A frame from a peer that is not a message of the expected direction."""


class Codec(Generic[M]):
    """Encodes and decodes the messages of one direction, given as their union type."""

    def __init__(self, union: Any) -> None:
        self.encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes | bytearray | memoryview) -> M:
        try:
            return self._decoder.decode(frame)
        except msgspec.ValidationError:
            # Its own words may quote what a stranger has sent.
            raise WireError("a well-formed frame, but no message of this direction") from None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # RecursionError: a field of many nested arrays, which the decoder skips in search of the tag.
            raise WireError("a frame that is no message") from None
