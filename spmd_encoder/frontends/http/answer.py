"""From a request's items to their outcomes, and the way of a reply to its client."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmd_encoder.api.types import ItemOutcome, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemNaming, SourceItem, check_request_id, encode_items
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import Account
from spmd_encoder.frontends.http.exchange import Exchange
from spmd_encoder.frontends.http.render import Rendered
from spmd_encoder.frontends.remote import fetch_items

T = TypeVar("T")

# A reply goes out in pieces, so that a slow client holds up one piece, and its time is counted per piece.
_PIECE_BYTES = 256 * 1024


class HeldResponse(Response):
    """A reply that closes `held` (the account of its request's bytes) when it is sent, or cannot be."""

    def __init__(self, rendered: Rendered, held: ExitStack) -> None:
        length = str(sum(len(part) for part in rendered.body))
        headers = {**rendered.headers, "content-length": length}
        super().__init__(None, rendered.status, headers, media_type=rendered.media_type)
        self._parts = rendered.body
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in self._pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _pieces(self) -> Iterator[memoryview]:
        for part in self._parts:
            for start in range(0, len(part), _PIECE_BYTES):
                yield part[start : start + _PIECE_BYTES]


async def answer(
    request: Request,
    backend: Backend,
    account: Account,
    items: Sequence[SourceItem],
    *,
    request_id: str,
    output: OutputKind | None,
    name: ItemNaming,
    all_or_none: bool = False,
) -> list[ItemOutcome]:
    """The outcomes of `items`, those that are URLs fetched first; cancelled at once when the client disconnects.

    With `all_or_none` nothing is encoded where an item is bad already. Raises `EncoderError` where the request as a
    whole fails: CANCELLED, DEADLINE_EXCEEDED, with `all_or_none` the first bad item's, and what the service refuses.
    """
    loop = asyncio.get_running_loop()
    limit_s = backend.config.limits.request_timeout_s
    deadline = loop.time() + limit_s

    async def work() -> list[ItemOutcome]:
        try:
            async with asyncio.timeout_at(deadline):
                parsed = await fetch_items(
                    items,
                    backend.fetcher,
                    limits=backend.item_limits,
                    pool=backend.pool,
                    reserve=account.add,
                    name=name,
                )
        except TimeoutError:
            raise EncoderError(
                ErrorCode.DEADLINE_EXCEEDED, f"fetching the items took longer than {limit_s:g} s (--request-timeout-s)"
            ) from None
        bad = next((item for item in parsed if isinstance(item, EncoderError)), None)
        if all_or_none and bad is not None:
            raise bad
        left_s = deadline - loop.time()
        return await encode_items(
            backend.service, parsed, request_id=request_id, output=output, deadline_s=left_s, name=name
        )

    return await unless_gone(work(), request.receive)


async def unless_gone(work: Coroutine[None, None, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled at once when the client disconnects.

    Raises `EncoderError` CANCELLED then, else what `work` raises. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EncoderError(ErrorCode.CANCELLED, "the client has gone")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def take_request_id(request: Request, exchange: Exchange) -> str:
    """The header's id, or a new one, which every reply of this request then carries.

    Raises `EncoderError` INVALID_REQUEST for an id that may not be echoed.
    """
    given = request.headers.get("x-request-id")
    if given is not None:
        return check_request_id(given)
    exchange.request_id = f"enc-{uuid.uuid4().hex}"
    return exchange.request_id
