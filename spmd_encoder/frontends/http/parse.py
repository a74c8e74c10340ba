"""From a JSON body to items. Runs in the app's executor: the bodies are megabytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits, ParsedItem, check_count, check_request_id, parse_item

Encoding = Literal["base64", "float"]

_MAX_MESSAGE_CHARS = 300
_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")


class _Item(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    image: str


class _Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    items: list[_Item]
    output: OutputKind | None = None
    encoding_format: Encoding = "base64"
    request_id: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class ParsedRequest:
    items: list[ParsedItem]
    output: OutputKind | None
    encoding: Encoding
    request_id: str | None
    model: str | None


def parse_request(body: bytearray, *, max_items: int, limits: ItemLimits) -> ParsedRequest:
    """Decode, check, hash and price a whole request; an item's own fault is its value.

    Raises `EncoderError` INVALID_REQUEST or TOO_LARGE for the request as a whole.
    """
    decoded = _decode(body)
    body.clear()  # from here on the text of the items is enough; the account is kept until the reply is done
    check_count(len(decoded.items), max_items)
    if decoded.request_id is not None:
        check_request_id(decoded.request_id)
    texts = [item.image for item in decoded.items]
    decoded.items.clear()
    items: list[ParsedItem] = []
    for index in range(len(texts)):
        items.append(parse_item(Modality.IMAGE, texts[index], limits, index))
        texts[index] = ""
    return ParsedRequest(items, decoded.output, decoded.encoding_format, decoded.request_id, decoded.model)


def _decode(body: bytearray) -> _Body:
    try:
        return msgspec.json.decode(body, type=_Body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"the body is not JSON: {_short(str(error))}") from None
    except RecursionError:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the body is nested too deeply") from None


def _invalid(message: str) -> EncoderError:
    where = _WHERE.search(message)
    param = where[1] if where is not None and where[1] else None
    # An unknown or missing field is named in backquotes, and is the parameter itself.
    field = re.search(r"field `([^`]{1,64})`", message)
    if field is not None:
        param = f"{param}.{field[1]}" if param else field[1]
    text = _WHERE.sub("", message)
    return EncoderError(ErrorCode.INVALID_REQUEST, _short(text), param=param and _short(param))


def _short(text: str) -> str:
    """An unknown field's name is the client's own text and may be of any length."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "..."
