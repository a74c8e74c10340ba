"""`POST /v1/embeddings`, as clients of OpenAI's API call it: one vector per item, all or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from spmd_encoder.api.types import Modality, ModelInfo, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import (
    ItemLimits,
    ItemNaming,
    SourceItem,
    check_count,
    check_model,
    known_model,
    parse_item,
)
from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.call import Call, respond
from spmd_encoder.frontends.http.content import BodyKind, body_kind
from spmd_encoder.frontends.http.decode import decode_json
from spmd_encoder.frontends.http.errors import model_not_found
from spmd_encoder.frontends.http.openapi import EMBEDDINGS_REPLIES, EMBEDDINGS_REQUEST
from spmd_encoder.frontends.http.options import Encoding
from spmd_encoder.frontends.http.readers import read_json
from spmd_encoder.frontends.http.render import Rendered
from spmd_encoder.frontends.http.render_openai import render_openai
from spmd_encoder.media.fetch import is_remote


class _ImageUrl(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`detail` is OpenAI's hint of how much to look at a picture; it has no meaning here."""

    url: str
    detail: str | None = None


class _VideoUrl(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    url: str


class _InputAudio(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`data` is base64. `format` has no meaning here, since the bytes show it."""

    data: str
    format: str | None = None


class _Object(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`{"image": ...}`, `{"audio": ...}` or `{"video": ...}`, or a content part of OpenAI's chat as its `type` says."""

    image: str | None = None
    audio: str | None = None
    video: str | None = None
    type: Literal["image_url", "input_audio", "video_url"] | None = None
    image_url: _ImageUrl | None = None
    input_audio: _InputAudio | None = None
    video_url: _VideoUrl | None = None

    def given(self) -> dict[str, str]:
        """The text of each member but `type`, by the member's name."""
        part = self.input_audio
        texts = {
            "image": self.image,
            "audio": self.audio,
            "video": self.video,
            "image_url": None if self.image_url is None else self.image_url.url,
            "input_audio": None if part is None else "data:audio/x;base64," + part.data,
            "video_url": None if self.video_url is None else self.video_url.url,
        }
        return {name: text for name, text in texts.items() if text is not None}


class _Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Numbers and lists of them are what OpenAI's clients send as text that is tokenized already."""

    input: str | _Object | list[str | _Object | int | list[Any]]
    model: str | None = None
    encoding_format: Encoding | None = None
    dimensions: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class _Parsed:
    items: list[SourceItem]
    name: ItemNaming
    encoding: Encoding
    model: str | None
    dimensions: int | None


_PARTS = MappingProxyType(
    {"image_url": Modality.IMAGE, "input_audio": Modality.AUDIO, "video_url": Modality.VIDEO},
)
_NO_ITEM = (
    "this server embeds pictures, sounds and films, not text; send each as a data URI (data:image/png;base64,...) or a "
    'URL (https://...): a picture alone, or {"image": "..."}, {"audio": "..."}, {"video": "..."}, or a content part of '
    "type image_url, input_audio or video_url"
)


def embeddings_routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/embeddings",
        summary="Embed pictures, sounds or films, one vector each, as OpenAI's API does",
        response_model=schemas.EmbeddingsReply,
        responses=EMBEDDINGS_REPLIES,
        openapi_extra=EMBEDDINGS_REQUEST,
    )
    async def embeddings(request: Request) -> Response:
        return await respond(request, backend, _embeddings)

    return router


async def _embeddings(call: Call) -> Rendered:
    backend = call.backend
    body_kind(call.request, BodyKind.JSON)
    _check_pooled(known_model(backend.service))  # before any picture is read
    parse = partial(_parse, max_items=backend.max_items, limits=backend.item_limits)
    parsed = await read_json(call, parse)
    model = _check_model(backend, parsed.model)
    _check_dimensions(known_model(backend.service), parsed.dimensions)
    outcomes = await call.outcomes(parsed.items, output=OutputKind.POOLED, name=parsed.name, all_or_none=True)
    job = partial(render_openai, model, outcomes, parsed.encoding, parsed.name)
    return await call.rendered(job, outcomes, parsed.encoding)


def _parse(body: bytearray, *, max_items: int, limits: ItemLimits) -> _Parsed:
    """Only up to the first bad item: there are no partial results, so the rest need not be looked at."""
    decoded = decode_json(body, _Body)
    body.clear()
    given = decoded.input
    name: ItemNaming = _name_in_list if isinstance(given, list) else _name_alone
    inputs = given if isinstance(given, list) else [given]
    check_count(len(inputs), max_items, param="input")
    items: list[SourceItem] = []
    for index in range(len(inputs)):
        items.append(_source(inputs[index], limits, name(index)))
        if isinstance(items[-1], EncoderError):
            break
        inputs[index] = ""  # its text is not needed any more
    return _Parsed(items, name, decoded.encoding_format or "float", decoded.model, decoded.dimensions)


def _name_alone(_: int) -> str:
    return "input"


def _name_in_list(index: int) -> str:
    return f"input[{index}]"


def _source(entry: str | _Object | int | list[Any], limits: ItemLimits, name: str) -> SourceItem:
    """One input; its failure is a value."""
    match entry:
        case str():
            given, kind = {"image": entry}, None
        case _Object(type=kind):
            given = entry.given()
        case _:
            given, kind = {}, None
    if len(given) == 1:
        ((member, text),) = given.items()
        # A content part names its member in `type`; the others have none.
        is_whole = member == kind if member in _PARTS else kind is None
        # Of a path `parse_item` says what to write instead.
        if is_whole and (text[:5].lower() == "data:" or text[:1] == "/" or is_remote(text)):
            return parse_item(_PARTS.get(member) or Modality(member), text, limits, name)
    return EncoderError(ErrorCode.INVALID_REQUEST, _NO_ITEM, param=name)


def _check_model(backend: Backend, model: str | None) -> str:
    """The served name. Raises `HttpError` with the code that OpenAI's clients know."""
    try:
        return check_model(backend.service, backend.config.served_name, model)
    except EncoderError as error:
        raise model_not_found(error) from None


def _check_pooled(info: ModelInfo) -> None:
    """Raises `EncoderError` INVALID_REQUEST where the model has no vector per picture."""
    if OutputKind.POOLED not in info.outputs:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST,
            f"{info.name} gives one row per token and no single vector per picture; use POST /v1/encode with "
            '"output": "tokens"',
            param="model",
        )


def _check_dimensions(info: ModelInfo, dimensions: int | None) -> None:
    """Raises `EncoderError` INVALID_REQUEST where its vectors have not `dimensions` values."""
    dim = info.embedding_dims[OutputKind.POOLED]
    if dimensions not in (None, dim):
        raise EncoderError(
            ErrorCode.INVALID_REQUEST,
            f"vectors of {info.name} have {dim} dimensions and are not shortened; leave `dimensions` out",
            param="dimensions",
        )
