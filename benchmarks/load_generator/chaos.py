"""Bad inputs, and clients that hang up: what a server must outlive, and what it must answer."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

_PATIENCE_S = 2.0


@dataclass(frozen=True)
class BadInput:
    """A request that must be refused with one of `statuses`."""

    name: str
    body: bytes
    statuses: tuple[int, ...]
    content_type: str = "application/octet-stream"
    query: str = ""


@dataclass(frozen=True)
class HangUp:
    """A client that goes after this share of its request's bytes; after all of them it waits `then_s` first."""

    name: str
    share: float
    then_s: float = 0.0


Chaos = BadInput | HangUp


def all_chaos(jpeg: bytes) -> Sequence[Chaos]:
    """Every bad thing, made from one good picture."""
    json, broken_uri = "application/json", b'{"items": [{"image": "data:image/png;base64,%%%"}]}'
    return (
        BadInput("text", b"this is no picture", (415, 422)),
        BadInput("empty", b"", (400, 415, 422)),
        BadInput("cut off", jpeg[: len(jpeg) // 2], (422,)),
        BadInput("too many pixels", _png_header(60_000, 60_000), (413,)),
        BadInput("broken JSON", b'{"items": [', (400,), json),
        BadInput("broken base64", broken_uri, (400, 422), json),
        BadInput("unknown type", jpeg, (415,), "application/zip"),
        BadInput("unknown option", jpeg, (400,), query="?nonsense=1"),
        HangUp("gone at once", 0.0),
        HangUp("gone in the body", 0.5),
        HangUp("gone after sending", 1.0),
        HangUp("gone while waiting", 1.0, 0.005),
    )


def _png_header(width: int, height: int) -> bytes:
    chunks = (struct.pack(">4sIIBBBBB", b"IHDR", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b""))
    whole = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(whole)


async def hang_up(url: str, body: bytes, how: HangUp) -> str:
    """Returns `OK` where the server took the connection, else what broke."""
    parts = urlsplit(url)
    head = f"POST /v1/encode HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/octet-stream\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    try:
        async with asyncio.timeout(_PATIENCE_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            writer.write(request[: int(how.share * len(request))])
            await writer.drain()
            await asyncio.sleep(how.then_s)
            writer.close()
            await writer.wait_closed()
    return "OK"
