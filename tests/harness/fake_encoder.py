"""A small real HTTP server that answers as the encoder does, for tests of the client; no replica, no model.

A picture's embedding is made of its width and height, so that a test sees which picture a row belongs to.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, Self

import uvicorn
from PIL import Image, UnidentifiedImageError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

SAFETENSORS = "application/vnd.safetensors"
MODEL = "fake"
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class FakeEncoder:
    """Use it in `with`. `dtype` is that of the embeddings; `ready` what `/health/ready` says.

    `seen` holds, per request to `/v1/encode`: media type, query, sizes or URLs of its items, the peer's port.
    `gate` lets encodes through, as do the first `free` of them; `held` says that one waits for it. `peak` is the most
    that were inside at a time.
    """

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.ready = True
        self.seen: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.free = 0
        self.held = threading.Event()
        self.peak = 0
        self._inside = 0
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        routes = [
            Route("/v1/encode", self._encode, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/info", self._info),
            Route("/health/ready", self._ready),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._sock]})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.should_exit = True
        self._thread.join()
        self._sock.close()

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "dtype": self.dtype, "revision": None}]})

    async def _info(self, _: Request) -> Response:
        return JSONResponse({"version": "fake", "processes": []})

    async def _ready(self, _: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def _encode(self, request: Request) -> Response:
        self._inside += 1
        self.peak = max(self.peak, self._inside)
        try:
            return await self._answer(request)
        finally:
            self._inside -= 1

    async def _answer(self, request: Request) -> Response:
        kind = request.headers["content-type"].partition(";")[0]
        items, options = await _read(request, kind)
        sizes = [item if isinstance(item, str) else len(item) for item in items]
        assert request.client is not None
        self.seen.append({"type": kind, "options": options, "items": sizes, "port": request.client.port})
        if len(self.seen) > self.free and not self.gate.is_set():
            self.held.set()
            await asyncio.to_thread(self.gate.wait)
        if unknown := options.keys() - {"output", "model"}:
            return _refusal(400, "INVALID_REQUEST", f"unknown options {sorted(unknown)}")
        if options.get("model", MODEL) != MODEL:
            return _refusal(404, "MODEL_NOT_FOUND", "another model is served")
        outcomes = [self._outcome(index, item, options.get("output")) for index, item in enumerate(items)]
        body = {"id": "enc-1", "model": MODEL, "data": [entry for entry, _ in outcomes]}
        headers = {"x-spmd-replica": "0", "x-request-id": "enc-1"}
        if not any(data for _, data in outcomes):
            error = outcomes[0][0]["error"]
            status = 422 if error["code"] == "MEDIA_CORRUPT" else 503
            return JSONResponse({**body, "error": error}, status, headers)
        assert request.headers["accept"] == SAFETENSORS
        return Response(_safetensors(body, outcomes), headers=headers, media_type=SAFETENSORS)

    def _outcome(self, index: int, item: bytes | str, output: str | None) -> tuple[dict[str, Any], bytes]:
        try:
            if isinstance(item, str) and not item.startswith("data:"):
                width, height = len(item), 1  # nothing is fetched here
            else:
                width, height = _size(item)
        except (UnidentifiedImageError, ValueError):
            error = {
                "message": "the picture cannot be decoded",
                "type": "invalid_request_error",
                "param": f"items[{index}]",
                "code": "MEDIA_CORRUPT",
            }
            return {"index": index, "status": "error", "error": error}, b""
        rows = 3 if output == "tokens" else 1
        values = [float(width), float(height)] * rows
        entry = {
            "index": index,
            "status": "ok",
            "modality": "image",
            "shape": [rows, 2] if output == "tokens" else [2],
            "dtype": self.dtype,
            "grid": [1, 1, rows],
            "num_tokens": rows,
            "digest": f"sha256:{hashlib.sha256(item.encode() if isinstance(item, str) else item).hexdigest()}",
        }
        return entry, _packed(values, self.dtype)


async def _read(request: Request, kind: str) -> tuple[list[bytes | str], dict[str, str]]:
    if kind == "application/json":
        fields = await request.json()
        return [item["image"] for item in fields.pop("items")], fields
    options = dict(request.query_params)
    body = await request.body()
    if kind == "multipart/form-data":
        return list(_parts(body, request.headers["content-type"].partition("boundary=")[2])), options
    assert kind == "application/octet-stream"
    return [body], options


def _parts(body: bytes, boundary: str) -> Iterator[bytes]:
    first, *parts, last = body.split(f"--{boundary}".encode())
    assert (first, last) == (b"", b"--\r\n")
    for part in parts:
        head, _, data = part.partition(b"\r\n\r\n")
        assert b'name="file"' in head
        yield data.removesuffix(b"\r\n")


def _size(item: bytes | str) -> tuple[int, int]:
    if isinstance(item, str):
        item = base64.b64decode(item.partition(",")[2])
    with Image.open(io.BytesIO(item)) as image:
        return image.size


def _packed(values: list[float], dtype: str) -> bytes:
    if dtype == "bfloat16":  # the upper halves; the test's values are exact
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{'f' if dtype == 'float32' else 'e'}", *values)


def _safetensors(body: dict[str, Any], outcomes: list[tuple[dict[str, Any], bytes]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"response": json.dumps(body)}}
    data = b""
    for entry, raw in outcomes:
        if raw:
            span = [len(data), len(data) + len(raw)]
            header[str(entry["index"])] = {
                "dtype": _CODES[entry["dtype"]],
                "shape": entry["shape"],
                "data_offsets": span,
            }
            data += raw
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def _refusal(status: int, code: str, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, {"x-request-id": "enc-1", "x-spmd-replica": "none"})
