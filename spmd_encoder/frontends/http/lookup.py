"""`POST /v1/lookup`: which results are held, so that their items need not be sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from spmd_encoder.api.types import NO_OPTIONS, HeldResult, ItemOptions, Modality, OutputKind
from spmd_encoder.frontends.base import check_model, check_output, known_model
from spmd_encoder.frontends.digests import lookup_keys
from spmd_encoder.frontends.http import schemas
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.call import Call, respond
from spmd_encoder.frontends.http.content import BodyKind, body_kind
from spmd_encoder.frontends.http.decode import decode_json
from spmd_encoder.frontends.http.openapi import LOOKUP_REPLIES, LOOKUP_REQUEST
from spmd_encoder.frontends.http.options import check_no_query
from spmd_encoder.frontends.http.readers import read_json
from spmd_encoder.frontends.http.render import Rendered, json_rendered
from spmd_encoder.frontends.sampling import Fps, MaxFrames


class _Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`modality` and what a film is sampled by are those of all digests."""

    digests: list[str]
    output: OutputKind | None = None
    modality: Modality = Modality.IMAGE
    fps: Fps | None = None
    max_frames: MaxFrames | None = None
    model: str | None = None

    @property
    def options(self) -> ItemOptions:
        return ItemOptions(fps=self.fps, max_frames=self.max_frames) if self.modality is Modality.VIDEO else NO_OPTIONS


class _Entry(msgspec.Struct, frozen=True):
    index: int
    digest: str
    held: bool
    replicas: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    num_tokens: int | None = None
    grid: tuple[int, int, int] | None = None


class _Reply(msgspec.Struct, frozen=True):
    model: str
    output: str
    data: list[_Entry]


def lookup_routes(backend: Backend) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/lookup",
        summary="Tell which items' results are held in caches, by their digests",
        response_model=schemas.LookupReply,
        responses=LOOKUP_REPLIES,
        openapi_extra=LOOKUP_REQUEST,
    )
    async def lookup(request: Request) -> Response:
        return await respond(request, backend, _lookup)

    return router


async def _lookup(call: Call) -> Rendered:
    service = call.backend.service
    check_no_query(call.request)
    body_kind(call.request, BodyKind.JSON)
    body, keys = await read_json(call, _parse)
    model = check_model(service, call.backend.config.served_name, body.model)
    output = body.output or known_model(service).default_output
    check_output(service, output)
    found = service.lookup(keys, output)
    return json_rendered(200, _Reply(model, output.value, _entries(body.digests, found)))


def _parse(body: bytearray) -> tuple[_Body, list[str]]:
    """The request, and the keys of its items."""
    decoded = decode_json(body, _Body)
    return decoded, lookup_keys(decoded.digests, decoded.modality, decoded.options)


def _entries(digests: Sequence[str], found: Sequence[HeldResult | None]) -> list[_Entry]:
    return [
        _Entry(index, digest, False)
        if held is None
        else _Entry(index, digest, True, held.replicas, held.shape, held.dtype, held.num_tokens, held.grid)
        for index, (digest, held) in enumerate(zip(digests, found, strict=True))
    ]
