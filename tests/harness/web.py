"""A web server on loopback that does exactly what a test says, byte by byte, and names that lead to it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address

from spmd_encoder.media.addresses import Address

Answer = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request, and the connection to answer it on."""

    def __init__(self, head: str, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        self.head = head
        self.path = head.split(" ")[1]
        self.headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        self._writer = writer
        self._reader = reader

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self, body: bytes = b"", status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    async def redirect(self, location: str, *headers: str, status: str = "302 Found") -> None:
        await self.reply(b"elsewhere", status, f"Location: {location}", *headers)

    async def hang_up(self) -> None:
        """Wait until the client has closed."""
        with suppress(ConnectionError):
            await self._reader.read()

    def reset(self) -> None:
        """Drop the connection without an end."""
        self._writer.transport.abort()


class Web:
    """What a server has seen. `open`: connections now, `peak`: the most at once."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[Exchange] = []
        self.connections = 0
        self.open = 0
        self.peak = 0
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def count(self, change: int) -> None:
        self.connections += max(change, 0)
        self.open += change
        self.peak = max(self.peak, self.open)
        self.changed.set()


@asynccontextmanager
async def web(answer: Answer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    state = Web()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.count(+1)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
            exchange = Exchange(head, writer, reader)
            state.seen.append(exchange)
            state.changed.set()
            await answer(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            tasks.discard(task)
            state.count(-1)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Names:
    """A resolver that knows some names. A list of lists is one answer after the other, the last one for ever."""

    def __init__(self, **names: Sequence[str] | Sequence[Sequence[str]]) -> None:
        self._names = {name.replace("_", "."): list(addresses) for name, addresses in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        if host not in self._names:
            raise OSError("no such name")
        answers = self._names[host]
        if answers and not isinstance(answers[0], str):
            answers = answers.pop(0) if len(answers) > 1 else answers[0]  # type: ignore[assignment]
        return [ip_address(address) for address in answers]  # type: ignore[arg-type]
