"""From JSON text, or loose fields, to typed structs; what does not fit is said in the caller's own terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from spmd_encoder.errors import EncoderError, ErrorCode

T = TypeVar("T")

_MAX_MESSAGE_CHARS = 300
_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")


def decode_json(body: bytearray, kind: type[T]) -> T:
    """Raises `EncoderError` INVALID_REQUEST, whose `param` is the path to what is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"the body is not JSON: {shortened(str(error))}") from None
    except RecursionError:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the body is nested too deeply") from None


def convert(fields: Mapping[str, object], kind: type[T]) -> T:
    """The same for fields that came as text."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def shortened(text: str) -> str:
    """The client's own text, as in an unknown field's name, may be of any length."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."


def _invalid(message: str) -> EncoderError:
    where = _WHERE.search(message)
    param = where[1] if where is not None and where[1] else None
    # An unknown or missing field is named in backquotes, and is the parameter itself.
    field = re.search(r"field `([^`]{1,64})`", message)
    if field is not None:
        param = f"{param}.{field[1]}" if param else field[1]
    text = _WHERE.sub("", message)
    return EncoderError(ErrorCode.INVALID_REQUEST, shortened(text), param=param and shortened(param))
