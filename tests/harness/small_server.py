"""A server that takes few requests, for tests of the client; it counts them, and its connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from spmd_encoder.client import AsyncClient


class Small:
    """A server that answers what its `rule` says, request by request: "ok", or a `Retry-After`, or for ever nothing.

    `names`: the bodies in the order of their coming. `inside`, `peak`: requests at a time. `connections`, `open`.
    """

    def __init__(self, rule: Callable[[Small, str], Awaitable[str | None]]) -> None:
        self._rule = rule
        self.url = ""
        self.names: list[str] = []
        self.inside = self.peak = self.connections = self.open = self.refused = 0
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                name = (await reader.readexactly(int(fields.get("content-length", 0)))).decode()
                self.names.append(name)
                self.inside += 1
                self.peak = max(self.peak, self.inside)
                self.changed.set()
                try:
                    wish = await self._rule(self, name)
                finally:
                    self.inside -= 1
                    self.changed.set()
                self.refused += wish != "ok"
                writer.write(GOOD if wish == "ok" else busy(str(wish)))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            self.open -= 1
            self.changed.set()
            writer.close()


def reply(status: int, body: object, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def busy(retry_after: str) -> bytes:
    error = {"message": "full", "type": "overloaded_error", "param": None, "code": "QUEUE_FULL"}
    return reply(429, {"error": error}, f"retry-after: {retry_after}")


# An outcome of the item, as short as one can be.
ERROR = {"message": "-", "type": "x", "param": "items[0]", "code": "MEDIA_CORRUPT"}
GOOD = reply(422, {"data": [{"index": 0, "status": "error", "error": ERROR}], "error": ERROR})


@contextlib.asynccontextmanager
async def small(rule: Callable[[Small, str], Awaitable[str | None]]) -> AsyncIterator[Small]:
    state = Small(rule)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await state.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answered(client: AsyncClient, name: str) -> str:
    """Raises where the request as a whole fails."""
    (result,) = await client.encode([name.encode()], raise_on_error=False)
    assert result.error is not None and result.error.code == "MEDIA_CORRUPT"
    return name
