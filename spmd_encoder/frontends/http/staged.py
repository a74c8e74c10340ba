"""`/v1/staged/{id}`: embeddings that a request to encode has left here, to be fetched once, or released."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from spmd_encoder.api.types import Embedding
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.accept import preferred
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.call import disconnected
from spmd_encoder.frontends.http.errors import HttpError
from spmd_encoder.frontends.http.openapi import RAW_TYPE, STAGED_DELETE_REPLIES, STAGED_GET, STAGED_GET_REPLIES
from spmd_encoder.frontends.http.options import check_no_query
from spmd_encoder.frontends.http.render import Rendered
from spmd_encoder.frontends.http.render_tensors import MEDIA_TYPE as SAFETENSORS_TYPE
from spmd_encoder.frontends.http.reply import HeldResponse
from spmd_encoder.transports.safetensors import SafetensorsWriter, about
from spmd_encoder.transports.staged import Shelf

_TENSOR_NAME = "embedding"
# Of the event loop, from a write that fails to whoever waits for the client to hang up.
_TURNS = 8
_KEEP = {"keep=1": True, "keep=0": False, "": False}


def staged_routes(backend: Backend) -> APIRouter:
    router = APIRouter()
    shelf = backend.destinations.shelf

    @router.get(
        "/v1/staged/{staged_id}",
        summary="Fetch a staged embedding; a complete read releases it",
        response_class=Response,
        responses=STAGED_GET_REPLIES,
        openapi_extra=STAGED_GET,
    )
    async def fetch(request: Request, staged_id: str) -> Response:
        keep = _keep(request)
        with ExitStack() as held:
            try:
                embedding = held.enter_context(shelf.reading(staged_id))
            except KeyError:
                raise _not_there() from None
            form = preferred(request, (SAFETENSORS_TYPE, RAW_TYPE))
            rendered = _raw(embedding) if form == RAW_TYPE else _safetensors(embedding)
            reply = HeldResponse if keep else _LastResponse
            response = reply(rendered, held.pop_all())
        if isinstance(response, _LastResponse):
            response.then_release(shelf, staged_id)
        return response

    @router.delete(
        "/v1/staged/{staged_id}",
        summary="Release a staged embedding",
        status_code=204,
        response_class=Response,
        responses=STAGED_DELETE_REPLIES,
    )
    async def release(request: Request, staged_id: str) -> Response:
        check_no_query(request)
        if not shelf.release(staged_id):
            raise _not_there()
        return Response(status_code=204)

    return router


class _LastResponse(HeldResponse):
    """Releases what it sends once all of it is handed over and its client is still there."""

    def then_release(self, shelf: Shelf, staged_id: str) -> None:
        self._shelf, self._staged_id = shelf, staged_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.body" and not message["more_body"]:
                # Waits until the connection takes more.
                await send({"type": "http.response.body", "body": b"", "more_body": True})
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if not gone.done():
                    self._shelf.release(self._staged_id)
            await send(message)
            await asyncio.sleep(0)

        try:
            await super().__call__(scope, receive, watched)
        finally:
            gone.cancel()


def _safetensors(embedding: Embedding) -> Rendered:
    file = SafetensorsWriter()
    file.add(_TENSOR_NAME, embedding)
    return Rendered(200, file.finish(about(embedding)), media_type=SAFETENSORS_TYPE)


def _raw(embedding: Embedding) -> Rendered:
    headers = {"x-spmd-dtype": embedding.dtype, "x-spmd-shape": ",".join(map(str, embedding.shape))}
    return Rendered(200, (memoryview(embedding.data).cast("B"),), headers, RAW_TYPE)


def _keep(request: Request) -> bool:
    query = request.scope["query_string"].decode("latin-1")
    if query not in _KEEP:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the only query parameter here is keep, which is 0 or 1")
    return _KEEP[query]


def _not_there() -> HttpError:
    return HttpError(
        404,
        "NOT_FOUND",
        "nothing is staged under this id: it was fetched or released, or waited longer than --send-timeout-s",
    )
