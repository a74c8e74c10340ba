"""From JSON text, or loose fields, to typed structs; what does not fit is said in the caller's own terms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec
from msgspec import inspect

from spmd_encoder.errors import EncoderError, ErrorCode

T = TypeVar("T")

_MAX_MESSAGE_CHARS = 300
_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")
_CHOICE = re.compile(r"Invalid enum value .* - at `(?:.*\.)?(\w+)`$", re.DOTALL)
# The first half of a surrogate pair, as an escape, without its second.
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def decode_json(body: bytearray, kind: type[T]) -> T:
    """Raises `EncoderError` INVALID_REQUEST, whose `param` is the path to what is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except msgspec.DecodeError as error:
        why = str(error)
        if "truncated" in why and _HALF_PAIR.search(body):
            why = "a string has half of a surrogate pair (\\ud800 to \\udfff)"
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"the body is not JSON: {shortened(why)}") from None
    except RecursionError:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the body is nested too deeply") from None


def convert(fields: Mapping[str, object], kind: type[T]) -> T:
    """The same for fields that came as text."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None


def shortened(text: str) -> str:
    """The client's own text, as in an unknown field's name, may be of any length."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."


def _invalid(message: str, kind: type) -> EncoderError:
    where = _WHERE.search(message)
    param = where[1] if where is not None and where[1] else None
    # An unknown or missing field is named in backquotes, and is the parameter itself.
    field = re.search(r"field `([^`]{1,64})`", message)
    if field is not None:
        param = f"{param}.{field[1]}" if param else field[1]
    text = shortened(_WHERE.sub("", message))
    if (choice := _CHOICE.match(message)) is not None:
        text += f"; it is one of {', '.join(sorted(set(_choices(inspect.type_info(kind), choice[1]))))}"
    return EncoderError(ErrorCode.INVALID_REQUEST, text, param=param and shortened(param))


def _choices(kind: inspect.Type, name: str, *, wanted: bool = False) -> Iterator[str]:
    """What may be said where `kind`, or what it holds, has a field `name`."""
    match kind:
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from _choices(field.type, name, wanted=field.encode_name == name)
        case inspect.UnionType(types=types):
            for one in types:
                yield from _choices(one, name, wanted=wanted)
        case inspect.ListType(item_type=item):
            yield from _choices(item, name)
        case inspect.LiteralType(values=values) if wanted:
            yield from map(str, values)
        case inspect.EnumType(cls=cls) if wanted:
            yield from (str(member.value) for member in cls)
