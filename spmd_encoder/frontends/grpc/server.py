"""`GrpcFrontEnd`: grpc.aio inside the caller's event loop, in the place of a socket that listens already."""

from __future__ import annotations

import asyncio
import socket

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from spmd_encoder.api.service import EncoderService
from spmd_encoder.config import Config
from spmd_encoder.errors import StartupError
from spmd_encoder.frontends.grpc.calls import DEFAULT_TIMEOUTS, Calls, Timeouts
from spmd_encoder.frontends.grpc.health import HealthService
from spmd_encoder.frontends.grpc.metrics import GrpcMetrics
from spmd_encoder.frontends.grpc.native import NativeService
from spmd_encoder.frontends.grpc.sglang import SglangService
from spmd_encoder.frontends.shared import Shared

_MAX_CALLS = 16384
_MAX_CALLS_OF_A_CONNECTION = 4096
_MAX_REFLECTIONS = 64
# A caller that never reads its reply would keep it for ever: a connection is renewed now and then, and calls that are
# older than that end with it.
_CONNECTION_AGE_MS, _CONNECTION_GRACE_MS = 30 * 60 * 1000, 5 * 60 * 1000
# Longer than the longest drain: what is left of a call then is cancelled here and not by gRPC.
_LONG_S = 24 * 3600.0
# How long watchers of health have to take the last word.
_TELL_S = 1.0


class GrpcFrontEnd:
    """Takes the place of `sock`, which is bound and listens: gRPC takes no socket of others, so it is closed and its
    address bound anew. Raises StartupError (exit code 3) where that fails.

    `shared` stays the caller's; without one the front end has its own.
    """

    def __init__(
        self,
        service: EncoderService,
        config: Config,
        sock: socket.socket,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        max_connections: int = 65536,
        shared: Shared | None = None,
    ) -> None:
        self._owns_shared = shared is None
        self.shared = shared = shared or Shared.open(service, config)
        self._calls = Calls(service, config, GrpcMetrics(shared.registry), timeouts)
        native, sglang = NativeService(service, config, shared), SglangService(config, shared)
        names = [native.name, sglang.name]
        self._health = HealthService(self._calls, service.ready_state, names)
        self._server = grpc.aio.server(
            handlers=[
                self._calls.handlers(native.name, native.methods()),
                self._calls.handlers(sglang.name, sglang.methods()),
                self._health.handler(),
                _reflection([*names, HealthService.name, reflection.SERVICE_NAME]),
            ],
            options=_options(config, max_connections),
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        _listen(self._server, sock)
        self._stopped = asyncio.Event()
        self._timeout_s: float | None = None

    async def serve(self) -> None:
        """Answer until `stop`; return when the replies in flight are sent."""
        stopped = asyncio.create_task(self._stopped.wait())
        following = asyncio.create_task(self._health.follow())
        ended = None
        try:
            await self._server.start()
            ended = asyncio.create_task(self._server.wait_for_termination())
            await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopped.is_set():
                ended.result()
                raise RuntimeError("the gRPC server ended by itself")
            telling = asyncio.create_task(self._health.end(_TELL_S))
            closing = asyncio.create_task(self._server.stop(_LONG_S))  # takes nothing new
            await self._calls.finish(self._timeout_s)
            await telling
            await self._server.stop(None)  # ends what is left: watchers, reflection
            await closing
        finally:
            for task in (stopped, following, ended):
                if task is not None:
                    task.cancel()
            await self._server.stop(None)
            if self._owns_shared:
                await self.shared.close()

    def stop(self, timeout_s: float | None = None) -> None:
        """Take nothing new; cancel what still runs after `timeout_s` seconds (None: never)."""
        self._timeout_s = timeout_s
        self._stopped.set()


def _options(config: Config, max_connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.server.grpc_message_bytes),
        ("grpc.max_send_message_length", config.server.max_body_bytes),
        ("grpc.max_concurrent_streams", _MAX_CALLS_OF_A_CONNECTION),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", _CONNECTION_GRACE_MS),
        # Two servers on one port would share its connections between them.
        ("grpc.so_reuseport", 0),
    ]


def _listen(server: grpc.aio.Server, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    sock.close()
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupError(f"gRPC cannot listen on {address}: {error}", exit_code=3) from None


def _reflection_request(data: bytes) -> reflection_pb2.ServerReflectionRequest:
    """Noise becomes an empty question, which is answered as invalid. An exception would be logged with its traceback
    each time."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()


def _reflection(services: list[str]) -> grpc.GenericRpcHandler:
    servicer = reflection.aio.ReflectionServicer(services)
    # Its messages are received without our limits, so that only their number is bounded.
    free = asyncio.Semaphore(_MAX_REFLECTIONS)

    async def reflect(requests: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        async with free:
            async for reply in servicer.ServerReflectionInfo(requests, context):
                await context.write(reply)

    method = grpc.stream_stream_rpc_method_handler(
        reflect,
        request_deserializer=_reflection_request,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})
