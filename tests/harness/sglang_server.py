"""A real server over a fake service for tests of SGLang's routes, and what its receivers must get."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from spmd_encoder.api.types import Embedding, MediaItem, OutputKind
from spmd_encoder.config import Config
from spmd_encoder.frontends.http.metrics import HttpMetrics
from spmd_encoder.frontends.http.server import HttpFrontEnd
from spmd_encoder.frontends.http.turns import Turns
from tests.harness import raw_http
from tests.harness.fake_service import FakeService, picture
from tests.harness.sglang_receiver import Message, Receiver
from tests.harness.sglang_receiver import Modality as TheirModality


def rows_of(item: MediaItem) -> Embedding:
    """`width` rows of (width, row number): a test sees whose rows came, and in which order."""
    values = [number for row in range(item.width) for number in (item.width, row)]
    return Embedding(
        modality=item.modality,
        kind=OutputKind.TOKENS,
        shape=(item.width, 2),
        dtype="float32",
        num_tokens=item.width,
        digest=item.digest,
        data=struct.pack(f"<{len(values)}f", *values),
        grid=(1, 2, item.width * 2),
        replica=0,
    )


def wanted(*widths: int) -> np.ndarray[Any, Any]:
    return np.array([(width, row) for width in widths for row in range(width)], np.float32)


@dataclass
class Served:
    service: FakeService
    http: httpx.AsyncClient
    front_end: HttpFrontEnd

    async def post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> httpx.Response:
        fields = {"Content-Type": "application/json", **(headers or {})}
        port = self.http.base_url.port
        assert port is not None
        return await raw_http.post(port, path, json.dumps(body).encode(), fields)

    async def encode(
        self, req_id: str = "r_local_part_0", *items: Any, wait_s: str | None = None, **fields: Any
    ) -> httpx.Response:
        body = {
            "encoder_idx": 0,
            "encoder_url": "http://encoder",
            "mm_items": list(items) or [picture(3)],
            "num_parts": 2,
            "part_idx": 1,
            "req_id": req_id,
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": None,
            "time_stats_json": None,
            **fields,
        }
        return await self.post("/encode", body, {} if wait_s is None else {"X-Request-Timeout": wait_s})

    async def register(self, receiver: Receiver, req_id: str = "r_local_part_0", count: int = 1) -> httpx.Response:
        body = {"req_id": req_id, "receive_count": count, "receive_url": receiver.url, "modality": "IMAGE"}
        return await self.post("/scheduler_receive_url", body)

    def later(self, work: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(work)

    def give_no_turns(self) -> None:
        """Every request with media comes when too many wait."""
        turns = Turns(0, self.service, HttpMetrics())
        self.front_end._config.http.turns = turns  # type: ignore[union-attr]

    async def idle(self) -> None:
        """Nothing is held any more."""
        while self.service.reserved or self.front_end.shared.dialect.staged_bytes:
            await asyncio.sleep(0.01)


def config(**changes: Any) -> Config:
    default = Config()
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section = next(
            s for s in ("sglang", "limits", "server", "media") if name in type(getattr(default, s)).__annotations__
        )
        sections.setdefault(section, {})[name] = value
    return replace(default, **{s: replace(getattr(default, s), **values) for s, values in sections.items()})


@asynccontextmanager
async def serving(settings: Config) -> AsyncIterator[Served]:
    service = FakeService()
    service.answer = rows_of
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    front_end = HttpFrontEnd(service, settings, sock)
    front_end._config.http.max_connections = 10_000  # type: ignore[union-attr]
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    task = asyncio.create_task(front_end.serve())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=150, limits=limits, trust_env=False) as http:
        yield Served(service, http, front_end)
    front_end.stop(0.5)
    await task


def check(message: Message, *widths: int, req_id: str = "r_local_part_0") -> None:
    head = message.head
    assert (head.req_id, head.num_parts, head.part_idx) == (req_id, 2, 1)
    assert (head.modality, head.error_msg) == (TheirModality.IMAGE, None)
    assert head.grid_dim == [[1, 2, width * 2] for width in widths]
    assert np.array_equal(message.values(), wanted(*widths))


def refused(reply: httpx.Response, status: int, *words: str, req_id: str | None = "r_local_part_0") -> str:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"status", "message", "req_id"}
    assert (body["status"], body["req_id"]) == ("error", req_id)
    assert all(word in body["message"] for word in words), body["message"]
    return str(body["message"])


def ok(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.json()) == (200, None), reply.text
