"""What all calls have in common: their message is read within limits, their failure becomes a status, and a drain
waits for them.

Messages come and go as bytes, so that large ones are parsed and written off the event loop. gRPC hands a message over
only when all of it is there, holds it meanwhile without asking, and copies it on the event loop with the GIL held: so
only a few are received at a time. What was received is accounted for before it is parsed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import grpc

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode, time_over
from spmd_encoder.frontends.account import Account
from spmd_encoder.frontends.base import check_request_id
from spmd_encoder.frontends.exchange import Exchange
from spmd_encoder.frontends.grpc.errors import DETAILS_KEY, Failure
from spmd_encoder.frontends.grpc.metrics import GrpcMetrics
from spmd_encoder.frontends.sglang.refusal import RefusalError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONTROL_BYTES = 64 * 1024
"""The largest message of a method that takes no media."""
_MAX_RECEIVING = 32
_REFUSAL_S = 0.1
# How long calls that a drain cut off may take to end.
_UNWIND_S = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Metadata = list[tuple[str, str | bytes]]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. `receive_s` bounds the arrival of a call's message."""

    receive_s: float = 60.0


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(eq=False)
class Call:
    """One call. `deadline` is on the loop's clock, the caller's or the server's, whichever is earlier."""

    context: Context
    exchange: Exchange
    account: Account
    deadline: float

    @property
    def time_left_s(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    @property
    def request_id(self) -> str:
        assert self.exchange.request_id is not None
        return self.exchange.request_id

    async def read(self, job: Callable[[], T], pool: Executor) -> T:
        """The result of `job`, which reads the message off the event loop and within the call's time. It is dropped
        where it has not begun when the caller goes. Raises what `job` raises, or `EncoderError` DEADLINE_EXCEEDED."""
        try:
            async with asyncio.timeout_at(self.deadline):
                return await asyncio.get_running_loop().run_in_executor(pool, job)
        except TimeoutError:
            raise time_over("receive") from None

    def take_request_id(self, given: str) -> None:
        """The message's id wins over the metadata's; without either one is made. Raises `EncoderError`."""
        if given:
            self.exchange.request_id = check_request_id(given)
        elif self.exchange.request_id is None:
            self.exchange.request_id = f"enc-{uuid.uuid4().hex}"


@dataclass(frozen=True, kw_only=True)
class Method:
    """`handle` gets the message and gives the reply, both serialized. `max_bytes` is the message's limit, whose
    flag is `limit_flag`."""

    handle: Callable[[Call, bytes], Awaitable[bytes]]
    max_bytes: int = MAX_CONTROL_BYTES
    limit_flag: str = ""


Stream = Callable[[Context], Awaitable[None]]
"""Reads its one message by `Calls.receive` and writes replies until it is cancelled: a drain does not wait for it."""
NO_STREAMS: Mapping[str, Stream] = MappingProxyType({})


class Calls:
    """Belongs to one event loop."""

    def __init__(self, service: EncoderService, config: Config, metrics: GrpcMetrics, timeouts: Timeouts) -> None:
        self._service = service
        self._config = config
        self._metrics = metrics
        self._timeouts = timeouts
        # Apart, so that what holds no media never waits for what does.
        self._receiving = {is_control: asyncio.Semaphore(_MAX_RECEIVING) for is_control in (True, False)}
        self._busy: set[asyncio.Task[Any]] = set()
        self._is_cut = False

    def handlers(
        self, service: str, methods: Mapping[str, Method], *, streams: Mapping[str, Stream] = NO_STREAMS
    ) -> grpc.GenericRpcHandler:
        # All of them streams of one message, which look the same on the wire and can be read under a time limit.
        answers: dict[str, Callable[..., Awaitable[None]]] = {
            name: partial(self._answer, f"{service}/{name}", method) for name, method in methods.items()
        }
        answers |= {name: partial(_streamed, stream) for name, stream in streams.items()}
        table: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.stream_stream_rpc_method_handler(answer) for name, answer in answers.items()
        }
        return grpc.method_handlers_generic_handler(service, table)

    async def finish(self, timeout_s: float | None) -> None:
        """Wait for the calls in flight; those that take longer are told that the server ends."""
        if self._busy:
            await asyncio.wait(self._busy, timeout=timeout_s)
        self._is_cut = True
        for task in self._busy:
            task.cancel()
        if self._busy:
            await asyncio.wait(self._busy, timeout=_UNWIND_S)

    async def receive(
        self, context: Context, *, max_bytes: int = MAX_CONTROL_BYTES, flag: str = "", deadline: float | None = None
    ) -> bytes:
        """The call's message. Raises `EncoderError`: INVALID_REQUEST, TOO_LARGE, DEADLINE_EXCEEDED."""
        timeout_s, loop = self._timeouts.receive_s, asyncio.get_running_loop()
        until = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(until if deadline is None else min(until, deadline)):
                async with self._receiving[max_bytes <= MAX_CONTROL_BYTES]:
                    data = await context.read()
        except TimeoutError:
            raise EncoderError(
                ErrorCode.DEADLINE_EXCEEDED, f"the call's message did not arrive within {timeout_s:g} s"
            ) from None
        if not isinstance(data, bytes):
            # Where gRPC has refused the message by itself, as too large, it cancels the call in a moment.
            await asyncio.sleep(_REFUSAL_S)
            raise EncoderError(ErrorCode.INVALID_REQUEST, "the call has no message")
        if len(data) > max_bytes:
            where = f" ({flag})" if flag else ""
            raise EncoderError(ErrorCode.TOO_LARGE, f"the message has more bytes than the limit of {max_bytes}{where}")
        return data

    async def _answer(self, name: str, method: Method, _: object, context: Context) -> None:
        exchange, code = Exchange(), grpc.StatusCode.CANCELLED
        held = ExitStack()
        self._begin(context, held)
        try:
            failure = await self._reply(method, context, exchange, held)
            if failure is None:
                code = grpc.StatusCode.OK
                return
            code = failure.status
            metadata: Metadata = [*_metadata(exchange), (DETAILS_KEY, failure.details())]
            await context.abort(failure.status, failure.message, tuple(metadata))
        finally:
            self._metrics.observe(name, code, time.perf_counter() - exchange.started)

    async def _reply(self, method: Method, context: Context, exchange: Exchange, held: ExitStack) -> Failure | None:
        """Why the call fails; None when its reply is sent."""
        try:
            call = self._call(context, exchange, held)
            data = await self.receive(
                context, max_bytes=method.max_bytes, flag=method.limit_flag, deadline=call.deadline
            )
            call.account.expect(len(data))
            call.account.add(len(data))
            work = method.handle(call, data)
            del data  # the handler lets go of it as soon as it can
            reply = await work
            context.set_trailing_metadata(_metadata(exchange))
            await context.write(reply)
            return None
        except EncoderError as error:
            return Failure.of(error)
        except RefusalError as refusal:
            return Failure.of_refusal(refusal)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            return Failure.of(EncoderError(ErrorCode.DRAINING, "the server ended before this call was done"))
        except grpc.aio.BaseError:  # the caller has gone
            raise
        except Exception:
            log.exception("a call failed unexpectedly")
            return Failure.of(EncoderError(ErrorCode.INTERNAL, "the server failed on this call; its log says why"))

    def _call(self, context: Context, exchange: Exchange, held: ExitStack) -> Call:
        """Raises `EncoderError` INVALID_REQUEST for a request id that may not be echoed."""
        limits, left_s = self._config.limits, context.time_remaining()
        timeout_s = limits.request_timeout_s if left_s is None else min(limits.request_timeout_s, left_s)
        account = Account(self._service, held, max_bytes=limits.max_inflight_bytes)
        given = dict(context.invocation_metadata() or ()).get("x-request-id")
        if given is not None:
            exchange.request_id = check_request_id(str(given))
        return Call(context, exchange, account, asyncio.get_running_loop().time() + timeout_s)

    def _begin(self, context: Context, held: ExitStack) -> None:
        """Until the caller has the reply, or has gone, the call counts and holds its bytes."""
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        self._metrics.in_flight.inc()

        def ended(_: Context) -> None:
            self._busy.discard(task)
            self._metrics.in_flight.dec()
            held.close()

        context.add_done_callback(ended)  # type: ignore[arg-type]


async def _streamed(stream: Stream, _: object, context: Context) -> None:
    await stream(context)


def _metadata(exchange: Exchange) -> Metadata:
    """Who answered, which request, how long: names and values are those of HTTP's headers."""
    return [(name.decode(), value.decode()) for name, value in exchange.headers()]
