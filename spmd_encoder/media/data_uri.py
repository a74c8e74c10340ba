"""Data URIs (RFC 2397): `data:[<type>][;<parameter>...][;base64],<data>`.

Strict where leniency would hide damage (alphabet, padding), lenient where clients differ for no harm (case, any
parameters, their order). The declared type is ignored by all who read pictures: only the content counts.
"""

from __future__ import annotations

import binascii
import re
from typing import NamedTuple
from urllib.parse import unquote, unquote_to_bytes

from spmd_encoder.errors import EncoderError, ErrorCode

# binascii holds the GIL: in pieces of about a millisecond, other threads go on between them.
_CHUNK = 2**20
_MAX_HEADER_CHARS = 1024
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FOREIGN = re.compile(r"[^A-Za-z0-9+/]")


class DataUri(NamedTuple):
    """`media_type` as declared (may be empty or wrong), `data` decoded."""

    media_type: str
    data: bytes


def parse_data_uri(uri: str, *, max_bytes: int | None = None) -> DataUri:
    """Decode one data URI.

    Raises `EncoderError` INVALID_REQUEST where it is malformed, TOO_LARGE where its data have more than `max_bytes`
    bytes (found before decoding). Messages never quote the data.
    """
    if uri[:5].lower() != "data:":
        raise _not_a_data_uri(uri)
    if not uri.isascii():
        raise _invalid("the data URI holds characters outside ASCII")
    comma = uri.find(",", 5, 5 + _MAX_HEADER_CHARS)
    if comma < 0:
        raise _invalid("the data URI has no comma between its header and its data; expected data:<type>;base64,<data>")
    media_type, *parameters = (part.strip() for part in uri[5:comma].split(";"))
    payload = uri[comma + 1 :]
    if not payload:
        raise _invalid("the data URI carries no data after its comma")
    if any(parameter.lower() == "base64" for parameter in parameters):
        return DataUri(media_type, _from_base64(payload, max_bytes))
    return DataUri(media_type, _from_percent(payload, max_bytes))


def check_size(num_bytes: int, max_bytes: int | None) -> None:
    """Raises `EncoderError` TOO_LARGE where a media file of `num_bytes` is above the limit."""
    if max_bytes is not None and num_bytes > max_bytes:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the item has {num_bytes} bytes, more than the limit of {max_bytes} (--max-image-bytes)",
        )


def _invalid(message: str) -> EncoderError:
    return EncoderError(ErrorCode.INVALID_REQUEST, message)


def _not_a_data_uri(text: str) -> EncoderError:
    if not text:
        return _invalid("the item is empty; send a data URI")
    if _SCHEME.match(text):
        return _invalid("the item is a URL of a kind that is not read; send a data URI, or an http, https or file URL")
    return _invalid(
        "the item is neither a data URI nor a URL: the prefix data:<type>;base64, is missing (for example "
        "data:image/png;base64,); a file's path alone is not read, but file:///absolute/path is in the folder that "
        "--allowed-local-media-path names"
    )


def _from_percent(payload: str, max_bytes: int | None) -> bytes:
    if _BAD_ESCAPE.search(payload):
        raise _invalid("the data URI has a % that is not followed by two hexadecimal digits")
    check_size(len(payload) - 2 * payload.count("%"), max_bytes)
    return unquote_to_bytes(payload)


def _from_base64(payload: str, max_bytes: int | None) -> bytes:
    if "%" in payload:
        # The characters of the alphabet may themselves be escaped (%2B, %2F, %3D).
        payload = unquote(payload, errors="replace")
    body = payload.rstrip("=")
    check_size(len(body) * 3 // 4, max_bytes)
    padding = len(payload) - len(body)
    if padding > 2 or "=" in body or not body or len(payload) % 4:
        raise _base64_error(body)
    pieces = []
    try:
        for start in range(0, len(payload), _CHUNK):
            pieces.append(binascii.a2b_base64(payload[start : start + _CHUNK], strict_mode=True))
    except ValueError:
        raise _base64_error(body) from None
    return b"".join(pieces)


def _base64_error(body: str) -> EncoderError:
    """Say what is wrong with base64 text (given without its padding)."""
    foreign = _FOREIGN.search(body)
    if foreign is None:
        return _invalid("the data URI's base64 has wrong padding; its length must be a multiple of four, filled with =")
    if foreign[0].isspace():
        return _invalid("the data URI's base64 holds white space; send it in one line")
    if foreign[0] in "-_":
        return _invalid("the data URI uses the URL-safe base64 alphabet; send the standard one, with + and /")
    if foreign[0] == "=":
        return _invalid("the data URI's base64 has padding before its end")
    return _invalid("the data URI holds characters outside the base64 alphabet")
