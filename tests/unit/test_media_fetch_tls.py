"""Fetching media over TLS: whose certificate counts, and no way back to http."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

import httpcore
import pytest
import trustme

from spmd_encoder.errors import ErrorCode
from spmd_encoder.media.fetch import MediaFetcher
from spmd_encoder.media_flags import MediaConfig
from tests.harness.web import Exchange, Names, web
from tests.unit.test_media_fetch_rules import BODY, answer, failure, no_account


class Tls:
    def __init__(self, *names: str) -> None:
        ca = trustme.CA()
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert(*names).configure_cert(self.server)
        self.asked: list[str | None] = []
        self.server.sni_callback = lambda _, name, __: self.asked.append(name)
        self.client = httpcore.default_ssl_context()
        ca.configure_trust(self.client)

    def fetcher(self, trusting: bool = True) -> MediaFetcher:
        return MediaFetcher(
            MediaConfig(allow_private_media_hosts=True, media_fetch_timeout_s=20),
            resolve=Names(secure_example=["127.0.0.1"], other_example=["127.0.0.1"]),
            ssl_context=self.client if trusting else None,
        )


async def test_tls_is_for_the_original_name() -> None:
    tls = Tls("secure.example")
    async with web(answer, tls=tls.server) as server:
        assert await tls.fetcher().fetch(f"https://secure.example.:{server.port}/", reserve=no_account) == BODY
        assert tls.asked == ["secure.example"]
        assert server.seen[0].headers["host"] == f"secure.example:{server.port}"
        for url in (f"https://other.example:{server.port}/", f"https://127.0.0.1:{server.port}/"):
            error = await failure(tls.fetcher(), url)
            assert error.code is ErrorCode.FETCH_FAILED
            assert "TLS certificate is not valid for it" in error.message
        assert len(server.seen) == 1


async def test_tls_for_an_address() -> None:
    tls = Tls("127.0.0.1", "::1")
    for host in ("127.0.0.1", "::1"):
        async with web(answer, host, tls=tls.server) as server:
            name = f"[{host}]" if ":" in host else host
            assert await tls.fetcher().fetch(f"https://{name}:{server.port}/", reserve=no_account) == BODY
            assert server.seen[0].headers["host"] == f"{name}:{server.port}"


async def test_a_certificate_of_nobody_known() -> None:
    tls = Tls("secure.example")
    async with web(answer, tls=tls.server) as server:
        error = await failure(tls.fetcher(trusting=False), f"https://secure.example:{server.port}/")
        assert not server.seen
    assert error.code is ErrorCode.FETCH_FAILED
    assert "TLS certificate" in error.message


async def test_https_where_there_is_none() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await failure(Tls("x.example").fetcher(), f"https://secure.example:{port}/")
    assert error.code is ErrorCode.FETCH_FAILED
    assert "TLS" in error.message


async def test_cancelling_within_the_tls_handshake_closes_the_connection() -> None:
    greeted, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        greeted.set()
        with suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        media = Tls("x.example").fetcher()
        job = asyncio.create_task(media.fetch(f"https://secure.example:{port}/", reserve=no_account))
        await greeted.wait()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await gone.wait()


async def test_from_http_to_https_but_not_back() -> None:
    tls = Tls("secure.example")

    async def back(exchange: Exchange) -> None:
        await (exchange.redirect("http://secure.example/") if exchange.path == "/back" else exchange.reply(BODY))

    async with web(back, tls=tls.server) as secure:
        url = f"https://secure.example:{secure.port}"
        async with web(lambda exchange: exchange.redirect(url + exchange.path)) as plain:
            plain_url = f"http://other.example:{plain.port}"
            assert await tls.fetcher().fetch(f"{plain_url}/", reserve=no_account) == BODY
            for start in (plain_url, url):
                error = await failure(tls.fetcher(), f"{start}/back")
                assert error.code is ErrorCode.FETCH_FORBIDDEN
                assert "from https to http" in error.message
