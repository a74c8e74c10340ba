"""Requests on connections of their own: httpx's pool takes seconds to find one among a thousand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx


async def post(port: int, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
    """The reply of the server on this machine's `port`, which says its length or ends with the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        fields = {"Host": "localhost", "Connection": "close", **headers, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        top, _, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *lines = top.decode("latin-1").split("\r\n")
    replied = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return httpx.Response(int(status.split()[1]), headers=replied, content=content)
