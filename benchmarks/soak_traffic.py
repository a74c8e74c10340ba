"""Requests for the soak: one class per way of embeddings to their receiver, each request with exactly one outcome.

Each client has one request at a time and, where it needs one, a receiver's socket of its own.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx

from benchmarks.bare_http import http_request, json_request
from benchmarks.soak_hangups import hang_up
from spmd_encoder.client.receiver import EmbeddingReceiver
from spmd_encoder.frontends.grpc.protos import encoder_pb2 as pb
from tests.harness.grpc_client import GrpcClient, data_items
from tests.harness.sglang_receiver import Receiver

OK, HUNG_UP = "ok", "hung up"
_CANCEL_S = 0.03


@dataclass
class Target:
    """The server, and what the clients of one run share. `arrived` counts pushed messages by their request."""

    port: int
    grpc_port: int
    folder: Path
    rng: random.Random
    arrived: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class SoakClient(Protocol):
    async def ask(self, request_id: str, picture: bytes) -> str:
        """`OK`, or what is wrong with the answer."""
        ...

    async def leave(self, request_id: str, picture: bytes) -> None:
        """Begin the same and go away."""
        ...

    async def close(self) -> None: ...


class Http:
    """What the clients over HTTP have in common: `/v1/encode` with a raw picture, and where it is to go."""

    def __init__(self, target: Target, destination: str = "") -> None:
        self._target = target
        self._http = httpx.AsyncClient(base_url=target.url, timeout=60)
        self._destination = destination

    def _path(self, request_id: str) -> str:
        path = f"/v1/encode?output=tokens&request_id={request_id}"
        return path + (f"&destination={self._destination}" if self._destination else "")

    async def _entry(self, request_id: str, picture: bytes) -> dict[str, Any] | str:
        """The item's entry, or what is wrong."""
        reply = await self._http.post(
            self._path(request_id), content=picture, headers={"content-type": "application/octet-stream"}
        )
        if reply.status_code != 200:
            error = reply.json()["error"]
            return f"{reply.status_code} {error['code']}: {error['message'][:120]}"
        entry: dict[str, Any] = reply.json()["data"][0]
        if entry["digest"] != "sha256:" + hashlib.sha256(picture).hexdigest():
            return "another picture's embedding"
        return entry

    async def leave(self, request_id: str, picture: bytes) -> None:
        request = http_request(self._path(request_id), picture, "application/octet-stream")
        await hang_up(self._target.port, request, self._target.rng)

    async def close(self) -> None:
        await self._http.aclose()


class Inline(Http):
    async def ask(self, request_id: str, picture: bytes) -> str:
        entry = await self._entry(request_id, picture)
        if isinstance(entry, str):
            return entry
        return _size(entry, len(base64.b64decode(entry["embedding"])))


class Staged(Http):
    def __init__(self, target: Target) -> None:
        super().__init__(target, '{"type":"staged"}')

    async def ask(self, request_id: str, picture: bytes) -> str:
        entry = await self._entry(request_id, picture)
        if isinstance(entry, str):
            return entry
        path = f"/v1/staged/{entry['delivered']['staged_id']}"
        reply = await self._http.get(path, headers={"accept": "application/octet-stream"})
        if reply.status_code != 200:
            return f"{reply.status_code} on fetching"
        return _size(entry, len(reply.content))

    async def leave(self, request_id: str, picture: bytes) -> None:
        """Or fetches and goes away in the middle of that."""
        if self._target.rng.random() < 0.5:
            await super().leave(request_id, picture)
        elif isinstance(entry := await self._entry(request_id, picture), dict):
            fetch = http_request(f"/v1/staged/{entry['delivered']['staged_id']}", b"", "text/plain", "GET")
            await hang_up(self._target.port, fetch, self._target.rng)


class File(Http):
    def __init__(self, target: Target) -> None:
        super().__init__(target, '{"type":"file"}')

    async def ask(self, request_id: str, picture: bytes) -> str:
        entry = await self._entry(request_id, picture)
        if isinstance(entry, str):
            return entry
        there = (self._target.folder / entry["delivered"]["path"]).is_file()
        return _size(entry, entry["delivered"]["num_bytes"]) if there else "the file is not there"


class Pushed(Http):
    """To our own receiver; a client that leaves takes its socket along now and then."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._open()

    def _open(self) -> None:
        self._receiver = EmbeddingReceiver()
        self._destination = f'{{"type":"zmq","endpoint":"{self._receiver.endpoint}"}}'

    async def ask(self, request_id: str, picture: bytes) -> str:
        entry = await self._entry(request_id, picture)
        if isinstance(entry, str):
            return entry
        while True:
            header, rows = await self._receiver.receive_async()
            self._target.arrived[header.request_id] += 1
            if header.request_id == request_id:
                return _size(entry, rows.nbytes)

    async def leave(self, request_id: str, picture: bytes) -> None:
        await super().leave(request_id, picture)
        if self._target.rng.random() < 0.3:
            self._receiver.close()
            self._open()

    async def close(self) -> None:
        await super().close()
        self._receiver.close()


class Sglang(Http):
    """`/encode` as a language server calls it. `registers`: the receiver says by a call of its own where it is."""

    def __init__(self, target: Target, *, registers: bool) -> None:
        super().__init__(target)
        self._registers = registers
        self._receiver = Receiver()

    def _calls(self, request_id: str, picture: bytes) -> list[tuple[str, dict[str, Any]]]:
        encode = {
            "req_id": request_id,
            "num_parts": 1,
            "part_idx": 0,
            "modality": "IMAGE",
            "mm_items": ["data:;base64," + base64.b64encode(picture).decode()],
            "prefill_host": "127.0.0.1",
            "embedding_port": None if self._registers else self._receiver.port,
        }
        if not self._registers:
            return [("/encode", encode)]
        register = {"req_id": request_id, "receive_count": 1, "receive_url": self._receiver.url}
        calls = [("/encode", encode), ("/scheduler_receive_url", register)]
        self._target.rng.shuffle(calls)
        return calls

    async def ask(self, request_id: str, picture: bytes) -> str:
        posts = [self._http.post(path, json=fields) for path, fields in self._calls(request_id, picture)]
        replies = await asyncio.gather(*posts)
        for reply in replies:
            if reply.status_code != 200:
                return f"{reply.status_code} {reply.json().get('message', '')[:80]}"
        while True:
            message = await self._receiver.message()
            self._target.arrived[message.head.req_id] += 1
            if message.head.req_id == request_id:
                return OK if message.rows and message.values().size else "no rows"

    async def leave(self, request_id: str, picture: bytes) -> None:
        """Each call is broken off, or one of them; a receiver may be closed, too."""
        calls = self._calls(request_id, picture)
        broken = self._target.rng.sample(calls, self._target.rng.randint(1, len(calls)))
        whole = [asyncio.create_task(self._http.post(path, json=fields)) for path, fields in calls[len(broken) :]]
        for path, fields in broken:
            await hang_up(self._target.port, json_request(path, fields), self._target.rng)
        for task in whole:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._target.rng.random() < 0.3:
            self._receiver.close()
            self._receiver = Receiver()

    async def close(self) -> None:
        await super().close()
        self._receiver.close()


class Grpc:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._client = GrpcClient(target.grpc_port)

    def _request(self, request_id: str, picture: bytes) -> pb.EncodeRequest:
        return pb.EncodeRequest(items=data_items(picture), output=pb.OUTPUT_TOKENS, request_id=request_id)

    async def ask(self, request_id: str, picture: bytes) -> str:
        try:
            reply = await self._client.encode(self._request(request_id, picture), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        if reply.request_id != request_id:
            return "another request's reply"
        (result,) = reply.results
        return OK if result.embedding.data else result.error.code

    async def leave(self, request_id: str, picture: bytes) -> None:
        """By cancelling, by closing the connection, or as one that never spoke gRPC to its end."""
        rng = self._target.rng
        how = rng.randrange(3)
        if how == 2:
            _, writer = await asyncio.open_connection("127.0.0.1", self._target.grpc_port)
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
            writer.write(preface[: rng.randint(1, len(preface))])
            writer.close()
            return
        call = self._client.encode(self._request(request_id, picture))
        await asyncio.sleep(rng.uniform(0, _CANCEL_S))
        if how == 1:
            await self._client.channel.close()
            self._client = GrpcClient(self._target.grpc_port)
        else:
            call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call

    async def close(self) -> None:
        await self._client.channel.close()


@dataclass(frozen=True)
class Backend:
    """`flags` are the server's."""

    name: str
    make: Callable[[Target], SoakClient]
    flags: tuple[str, ...] = ()
    pushes: bool = False


BACKENDS = (
    Backend("inline", Inline),
    Backend("zmq_to_scheduler", lambda target: Sglang(target, registers=True), pushes=True),
    Backend(
        "zmq_to_tokenizer",
        lambda target: Sglang(target, registers=False),
        ("--encoder-transfer-backend", "zmq_to_tokenizer"),
        pushes=True,
    ),
    Backend("zmq", Pushed, pushes=True),
    Backend("file", File),
    Backend("staged", Staged),
    Backend("grpc", Grpc),
)


def _size(entry: dict[str, Any], num_bytes: int) -> str:
    """Whether the rows are as many bytes as the reply says."""
    wanted = 2 if entry["dtype"] in ("bfloat16", "float16") else 4
    for count in entry["shape"]:
        wanted *= count
    return OK if num_bytes == wanted else f"{num_bytes} bytes where {wanted} belong"
