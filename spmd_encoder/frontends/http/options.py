"""What a request asks for besides its items: the same options in a JSON body, a form or the query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request

from spmd_encoder.api.types import ItemOptions, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import check_request_id
from spmd_encoder.frontends.destinations import Destination, Elsewhere, Inline
from spmd_encoder.frontends.http.deadline import DeadlineMs
from spmd_encoder.frontends.http.decode import convert, decode_json, shortened
from spmd_encoder.frontends.sampling import Fps, MaxFrames

Encoding = Literal["base64", "float"]

# More than all options, so that a query of thousands is not split.
_MAX_FIELDS = 16


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """None where nothing was said."""

    output: OutputKind | None = None
    encoding_format: Encoding | None = None
    request_id: str | None = None
    model: str | None = None
    destination: Destination | None = None
    fps: Fps | None = None
    max_frames: MaxFrames | None = None
    deadline_ms: DeadlineMs | None = None

    @property
    def sampling(self) -> ItemOptions:
        return ItemOptions(fps=self.fps, max_frames=self.max_frames)

    @property
    def encoding(self) -> Encoding:
        return self.encoding_format or "base64"

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Where the embeddings go, if not into the reply."""
        return None if isinstance(self.destination, Inline) else self.destination


OPTION_NAMES = Options.__struct_fields__
# As text they are JSON.
_JSON_OPTIONS = frozenset({"destination", "fps", "max_frames", "deadline_ms"})


def options_of(fields: Iterable[tuple[str, str]]) -> Options:
    """Options that came as text. Raises `EncoderError` INVALID_REQUEST for an unknown, repeated or wrong one."""
    given: dict[str, object] = {}
    for name, text in fields:
        if name in given:
            raise given_twice(name)
        given[name] = _json_value(text, name) if name in _JSON_OPTIONS else text
    return convert(given, Options)


def query_options(request: Request) -> Options:
    """The options of the query string. Raises `EncoderError` INVALID_REQUEST as `options_of` does."""
    query = request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:  # UnicodeDecodeError is one, too
        raise EncoderError(
            ErrorCode.INVALID_REQUEST, "the query string is not UTF-8, or has too many parameters"
        ) from None
    for name, _ in pairs:
        if name not in OPTION_NAMES:
            unknown, known = shortened(name), ", ".join(OPTION_NAMES)
            raise EncoderError(
                ErrorCode.INVALID_REQUEST, f"unknown query parameter `{unknown}`; known are {known}", param=unknown
            )
    return options_of(pairs)


def merged(query: Options, body: Options) -> Options:
    """Both together, with a request id that may be echoed. Raises `EncoderError` INVALID_REQUEST for an option that
    both give, or a bad request id."""
    fields: dict[str, object] = {}
    for name in OPTION_NAMES:
        in_query, in_body = getattr(query, name), getattr(body, name)
        if in_query is not None and in_body is not None:
            raise given_twice(name)
        fields[name] = in_body if in_query is None else in_query
    options = msgspec.convert(fields, Options)
    if options.request_id is not None:
        check_request_id(options.request_id)
    return options


def _json_value(text: str, name: str) -> object:
    try:
        return decode_json(bytearray(text, "utf-8"), object)
    except (EncoderError, UnicodeEncodeError):
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"`{name}` is no JSON value", param=name) from None


def check_no_query(request: Request) -> None:
    """Raises `EncoderError` INVALID_REQUEST where a route without query parameters is given some."""
    if request.scope["query_string"]:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "this route has no query parameters")


def given_twice(name: str) -> EncoderError:
    return EncoderError(ErrorCode.INVALID_REQUEST, f"`{name}` is given twice", param=name)
