"""`grpc.health.v1.Health`: every service is SERVING exactly while requests are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2 as pb

from spmd_encoder.api.types import ReadyState
from spmd_encoder.errors import EncoderError
from spmd_encoder.frontends.base import is_ready
from spmd_encoder.frontends.grpc.calls import Call, Calls, Context, Method
from spmd_encoder.frontends.grpc.errors import Failure
from spmd_encoder.frontends.grpc.messages import parse

_LOOK_S = 0.1
_END_LOOK_S = 0.02


class HealthService:
    """`services` are those that can be asked for by name; the server as a whole is the empty name."""

    name = pb.DESCRIPTOR.services_by_name["Health"].full_name

    def __init__(self, calls: Calls, state: Callable[[], ReadyState], services: Sequence[str]) -> None:
        self._calls = calls
        self._state = state
        self._services = frozenset({"", *services})
        self._changed = asyncio.Event()
        self._ending = False
        self._watches: set[object] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        unary = {"Check": Method(handle=self._check), "List": Method(handle=self._list)}
        return self._calls.handlers(self.name, unary, streams={"Watch": self._watch})

    async def follow(self) -> None:
        """Tell watchers of changes, until cancelled."""
        was_ready = is_ready(self._state())
        while True:
            await asyncio.sleep(_LOOK_S)
            if was_ready is not (now_ready := is_ready(self._state())):
                was_ready = now_ready
                self._wake()

    async def end(self, timeout_s: float) -> None:
        """NOT_SERVING from now on; returns when watchers were told and their calls are over, or the time is."""
        self._ending = True
        self._wake()
        end = asyncio.get_running_loop().time() + timeout_s
        while self._watches and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_END_LOOK_S)

    async def _check(self, call: Call, data: bytes) -> bytes:
        if parse(pb.HealthCheckRequest, data).service not in self._services:
            await call.context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return _bytes(self._reply())

    async def _list(self, call: Call, data: bytes) -> bytes:
        parse(pb.HealthListRequest, data)
        return _bytes(pb.HealthListResponse(statuses=dict.fromkeys(self._services, self._reply())))

    async def _watch(self, context: Context) -> None:
        """A reply at once and at every change. A service that is not there may come, so asking for it is no error."""
        try:
            service = parse(pb.HealthCheckRequest, await self._calls.receive(context)).service
        except EncoderError as error:
            failure = Failure.of(error)
            await context.abort(failure.status, failure.message)
        last = None
        watch = object()
        self._watches.add(watch)
        try:
            while True:
                changed, ending = self._changed, self._ending
                reply = self._reply() if service in self._services else _response("SERVICE_UNKNOWN")
                if reply.status != last:
                    await context.write(_bytes(reply))
                last = reply.status
                if ending:
                    return
                await changed.wait()
        finally:
            self._watches.discard(watch)

    def _reply(self) -> pb.HealthCheckResponse:
        return _response("SERVING" if is_ready(self._state()) and not self._ending else "NOT_SERVING")

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _response(status: str) -> pb.HealthCheckResponse:
    return pb.HealthCheckResponse(status=pb.HealthCheckResponse.ServingStatus.Value(status))
