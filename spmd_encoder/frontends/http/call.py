"""One request to encode, whatever its route: its body's account, its items' outcomes, its reply."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from spmd_encoder.api.types import ItemOutcome, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode, time_over
from spmd_encoder.frontends.account import Account
from spmd_encoder.frontends.base import ItemNaming, ParsedItem, SourceItem, check_request_id
from spmd_encoder.frontends.exchange import Exchange
from spmd_encoder.frontends.http.backend import INLINE_BYTES, Backend
from spmd_encoder.frontends.http.body import body_chunks
from spmd_encoder.frontends.http.deadline import header_timeout_s
from spmd_encoder.frontends.http.exchange import exchange_of
from spmd_encoder.frontends.http.options import Encoding
from spmd_encoder.frontends.http.render import Rendered, is_heavy
from spmd_encoder.frontends.http.reply import HeldResponse
from spmd_encoder.frontends.remote import fetch_and_encode

T = TypeVar("T")


async def respond(request: Request, backend: Backend, handle: Callable[[Call], Awaitable[Rendered]]) -> Response:
    """The reply that `handle` makes of the request. What it reads is accounted for until the reply is sent."""
    exchange = exchange_of(request)
    request_id = _take_request_id(request, exchange)
    timeout_s = header_timeout_s(request)
    with ExitStack() as held:
        account = backend.account(held)
        call = Call(request, backend, account, exchange, request_id)
        call.limit_time(timeout_s)
        rendered = await handle(call)
        return HeldResponse(rendered, held.pop_all())


@dataclass
class Call:
    request: Request
    backend: Backend
    account: Account
    exchange: Exchange
    request_id: str
    _began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _wanted: float = math.inf
    _granted: float | None = None

    def limit_time(self, seconds: float | None) -> None:
        """The caller wants no answer later than so long after the request's headers came."""
        if seconds is not None:
            self._wanted = min(self._wanted, self._began + seconds)

    def name_request(self, request_id: str | None) -> None:
        """Take the id that the body gave, if any; it wins over the header's."""
        if request_id is not None:
            self.exchange.request_id = self.request_id = request_id

    def body(self) -> AsyncIterator[bytes]:
        """`body_chunks` within this server's limits."""
        max_bytes = self.backend.config.server.max_body_bytes
        timeouts = self.backend.timeouts
        return body_chunks(self.request, self.account, max_bytes=max_bytes, timeouts=timeouts, until=self._wanted)

    async def read(self, job: Callable[[], T], num_bytes: int) -> T:
        """The result of `job`, which reads a body of `num_bytes` that is here: off the event loop, but for small ones,
        and within the request's time.

        It is dropped where it has not begun when the client disconnects or the time is over. Raises what `job` raises,
        and `EncoderError` CANCELLED or DEADLINE_EXCEEDED.
        """
        if num_bytes <= INLINE_BYTES:
            return job()
        try:
            async with asyncio.timeout_at(self._time_is_over()):
                return await unless_gone(self.backend.run(job), self.request.receive)
        except TimeoutError:
            raise time_over("receive") from None

    async def outcomes(
        self, items: Sequence[SourceItem], *, output: OutputKind | None, name: ItemNaming, all_or_none: bool = False
    ) -> list[ItemOutcome]:
        """The outcomes of `items`, those that are URLs fetched first; cancelled at once when the client disconnects.

        With `all_or_none` nothing is encoded where an item is bad already. Raises `EncoderError` where the request as
        a whole fails: CANCELLED, DEADLINE_EXCEEDED, with `all_or_none` the first bad item's, what the service refuses.
        """
        work = self._fetch_and_encode(items, output, name, all_or_none)
        outcomes = await unless_gone(work, self.request.receive)
        self.exchange.note(outcomes)
        return outcomes

    async def delivery(self, work: Coroutine[None, None, T]) -> T:
        """The result of `work`, which brings embeddings to where they go, within the request's time.

        Raises `EncoderError` CANCELLED or DEADLINE_EXCEEDED, or what `work` raises.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(self._time_is_over()):
                return await unless_gone(work, self.request.receive)
        except TimeoutError:
            raise time_over("delivery") from None
        finally:
            self.exchange.delivery_s = loop.time() - began

    async def rendered(
        self, job: Callable[[], Rendered], outcomes: Sequence[ItemOutcome], encoding: Encoding
    ) -> Rendered:
        """The result of `job`, which writes `outcomes` in `encoding`: in a thread where that is heavy."""
        return await self.backend.run(job) if is_heavy(outcomes, encoding) else job()

    def _time_is_over(self) -> float:
        """In the loop's time. What the server grants begins when the body is here."""
        if self._granted is None:
            self._granted = asyncio.get_running_loop().time() + self.backend.config.limits.request_timeout_s
        return min(self._granted, self._wanted)

    def _fetched(self, seconds: float) -> None:
        self.exchange.fetch_s = seconds

    async def _fetch_and_encode(
        self, items: Sequence[SourceItem], output: OutputKind | None, name: ItemNaming, all_or_none: bool
    ) -> list[ItemOutcome]:
        def check(parsed: Sequence[ParsedItem]) -> None:
            if all_or_none and (bad := _first_error(parsed)) is not None:
                raise bad

        backend = self.backend
        if all_or_none and (known := _first_error(items)) is not None:
            backend.service.item_refused(known.code)
            raise known
        return await fetch_and_encode(
            backend.service,
            items,
            backend.fetcher,
            limits=backend.item_limits,
            pool=backend.pool,
            reserve=self.account.add,
            request_id=self.request_id,
            output=output,
            timeout_s=self._time_is_over() - asyncio.get_running_loop().time(),
            check=check,
            name=name,
            fetched=self._fetched,
        )


async def unless_gone(work: Coroutine[None, None, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled at once when the client disconnects.

    Raises `EncoderError` CANCELLED then, else what `work` raises. The body must have been read before.
    """
    caller = asyncio.current_task()
    assert caller is not None
    before = caller.cancelling()
    gone = asyncio.ensure_future(disconnected(receive))
    is_over = has_gone = False

    def hang_up(watched: asyncio.Future[None]) -> None:
        nonlocal has_gone
        if not watched.cancelled():
            watched.exception()  # nobody else asks for it
        if not is_over:
            has_gone = True
            caller.cancel()

    gone.add_done_callback(hang_up)
    try:
        return await work
    except asyncio.CancelledError:
        if has_gone and caller.cancelling() == before + 1:  # else somebody else cancels, too
            raise EncoderError(ErrorCode.CANCELLED, "the client has gone") from None
        raise
    finally:
        is_over = True
        gone.cancel()
        if has_gone:
            caller.uncancel()


def _first_error(items: Sequence[SourceItem]) -> EncoderError | None:
    return next((item for item in items if isinstance(item, EncoderError)), None)


async def disconnected(receive: Receive) -> None:
    """Return when the client has hung up, or has its reply. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _take_request_id(request: Request, exchange: Exchange) -> str:
    """The header's id, or a new one, which every reply of this request then carries.

    Raises `EncoderError` INVALID_REQUEST for an id that may not be echoed.
    """
    given = request.headers.get("x-request-id")
    if given is not None:
        return check_request_id(given)
    exchange.request_id = f"enc-{uuid.uuid4().hex}"
    return exchange.request_id
