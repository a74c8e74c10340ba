"""Fetching by URL: what is sent, what is accepted as an answer, how much and for how long."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable

import pytest

from spmd_encoder import __version__
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.fetch import MediaFetcher, is_remote
from spmd_encoder.media.http_fetch import MAX_REDIRECTS
from spmd_encoder.media_flags import MediaConfig
from tests.harness.web import Exchange, Names, web

BODY = bytes(range(256)) * 400  # more than one read
SECRET = "s3cr3t"
NAMES = {"pictures_example": ["127.0.0.1"], "other_example": ["127.0.0.1"]}


def no_account(num_bytes: int) -> None:
    pass


def fetcher(timeout_s: float = 20.0, max_mb: int = 64, max_fetches: int = 64) -> MediaFetcher:
    config = MediaConfig(
        allow_private_media_hosts=True, media_fetch_timeout_s=timeout_s, media_url_max_file_size_mb=max_mb
    )
    return MediaFetcher(config, resolve=Names(**NAMES), max_fetches=max_fetches)


async def failure(media: MediaFetcher, url: str, code: ErrorCode, reserve: Callable[[int], None] = no_account) -> str:
    """The message of the failure, which holds nothing secret."""
    with pytest.raises(EncoderError) as caught:
        await media.fetch(url, reserve=reserve)
    message = caught.value.message
    assert caught.value.code is code, message
    assert SECRET not in message
    assert message.isprintable()
    assert len(message) < 400
    return message


@pytest.mark.parametrize("text", ["http://a", "HTTPS://a", "hTTp://", "file:///x", "FILE://"])
def test_remote(text: str) -> None:
    assert is_remote(text)


@pytest.mark.parametrize("text", ["", "data:,x", "http:/a", "ftp://a", " http://a", "xhttp://a", "/etc/hosts"])
def test_not_remote(text: str) -> None:
    assert not is_remote(text)


async def test_the_bytes_arrive_and_are_accounted_for_before_they_are_kept() -> None:
    account: list[int] = []
    async with web(lambda exchange: exchange.reply(BODY)) as server:
        got = await fetcher().fetch(f"http://pictures.example:{server.port}/a.png", reserve=account.append)
        await server.until(lambda: server.open == 0)
    assert got == BODY
    assert sum(account) == len(BODY)
    assert all(account)


async def test_the_request_says_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    async with web(lambda exchange: exchange.reply(BODY)) as server:
        await fetcher().fetch(
            f"HTTP://Pictures.EXAMPLE.:{server.port}/ä b?q=%20ü#part".replace(" ", "%20"), reserve=no_account
        )
    (seen,) = server.seen
    assert seen.head.split("\r\n")[0] == "GET /%C3%A4%20b?q=%20%C3%BC HTTP/1.1"
    assert seen.headers == {
        "host": f"pictures.example:{server.port}",
        "user-agent": f"spmd_encoder/{__version__}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "connection": "close",
    }


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with web(lambda exchange: exchange.send(b"HTTP/1.1 200 OK\r\n\r\n" + BODY)) as server:
        assert await fetcher().fetch(f"http://127.0.0.1:{server.port}/", reserve=no_account) == BODY


async def test_a_chunked_body() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(BODY), 10_000):
            piece = BODY[start : start + 10_000]
            await exchange.send(b"%x\r\n%s\r\n" % (len(piece), piece))
        await exchange.send(b"0\r\n\r\n")

    async with web(answer) as server:
        assert await fetcher().fetch(f"http://127.0.0.1:{server.port}/", reserve=no_account) == BODY


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx", "404"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 1\r\n\r\nx", "500"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "204"),
        (b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/9\r\nContent-Length: 1\r\n\r\nx", "206"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "304"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nconnection: upgrade\r\n\r\n", "not proper HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "no content"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "no content"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", "Content-Encoding"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Encoding: br\r\n\r\nx", "Content-Encoding"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "broke off after 5 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nshort", "broke off after 5 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broke off after 0 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "not proper HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nxx", "not proper HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nxx", "not proper HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000 + b"\r\n\r\nxx", "not proper HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 60_000 + b"\r\nxx", "not proper HTTP"),
        (b"\x16\x03\x01\x00 TLS, perhaps", "not proper HTTP"),
        (b"", "not proper HTTP"),
    ],
)
async def test_what_is_no_good_answer(reply: bytes, says: str) -> None:
    async with web(lambda exchange: exchange.send(reply)) as server:
        url = f"http://pictures.example:{server.port}/a?token={SECRET}"
        message = await failure(fetcher(), url, ErrorCode.FETCH_FAILED)
        await server.until(lambda: server.open == 0)
    assert says in message
    assert message.startswith("pictures.example: ")


async def test_a_connection_that_is_reset_midway() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + BODY)
        exchange.reset()

    async with web(answer) as server:
        message = await failure(fetcher(), f"http://pictures.example:{server.port}/", ErrorCode.FETCH_FAILED)
    assert "broke off" in message


async def test_nobody_listens_or_there_is_no_such_name() -> None:
    async with web(lambda exchange: exchange.reply(BODY)) as server:
        port = server.port
    assert "accepts no connection" in await failure(fetcher(), f"http://127.0.0.1:{port}/", ErrorCode.FETCH_FAILED)
    message = await failure(fetcher(), f"http://unknown.example/?{SECRET}", ErrorCode.FETCH_FAILED)
    assert message == "unknown.example: there is no host of this name"


async def test_the_second_address_is_tried_where_the_first_is_dead() -> None:
    names = Names(two_example=["127.0.0.2", "127.0.0.1"])
    media = MediaFetcher(MediaConfig(allow_private_media_hosts=True), resolve=names)
    async with web(lambda exchange: exchange.reply(BODY)) as server:
        assert await media.fetch(f"http://two.example:{server.port}/", reserve=no_account) == BODY


async def endless(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await exchange.send(BODY)


@pytest.mark.parametrize("announced", [True, False])
async def test_more_than_the_limit(announced: bool) -> None:
    account: list[int] = []
    async with web(lambda exchange: exchange.reply(bytes(2**20 + 1)) if announced else endless(exchange)) as server:
        url = f"http://pictures.example:{server.port}/?{SECRET}"
        message = await failure(fetcher(max_mb=1), url, ErrorCode.TOO_LARGE, account.append)
        await server.until(lambda: server.open == 0)
    assert "1 MiB (--media-url-max-file-size-mb)" in message
    assert sum(account) <= (0 if announced else 2**20)


async def test_exactly_the_limit_and_no_limit() -> None:
    async with web(lambda exchange: exchange.reply(bytes(2**20 + int(exchange.path[1:])))) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert len(await fetcher(max_mb=1).fetch(f"{url}/0", reserve=no_account)) == 2**20
        assert len(await fetcher(max_mb=0).fetch(f"{url}/1", reserve=no_account)) == 2**20 + 1


async def test_what_reserve_raises_ends_the_fetch() -> None:
    held = 0

    def reserve(num_bytes: int) -> None:
        nonlocal held
        if held + num_bytes > 300_000:
            raise EncoderError(ErrorCode.OVERLOADED, "no more room")
        held += num_bytes

    async with web(endless) as server:
        url = f"http://pictures.example:{server.port}/"
        assert await failure(fetcher(), url, ErrorCode.OVERLOADED, reserve) == "no more room"
        await server.until(lambda: server.open == 0)


async def never(exchange: Exchange) -> None:
    await exchange.hang_up()


async def drip(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await exchange.send(b"x")
        await asyncio.sleep(0.01)


async def drip_headers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        await exchange.send(b"x")
        await asyncio.sleep(0.01)


async def hints(exchange: Exchange) -> None:
    while True:
        await exchange.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [never, drip, drip_headers, hints])
async def test_too_slow(answer: Callable[[Exchange], object]) -> None:
    async with web(answer) as server:  # type: ignore[arg-type]
        url = f"http://pictures.example:{server.port}/?{SECRET}"
        message = await failure(fetcher(timeout_s=0.2), url, ErrorCode.FETCH_FAILED)
        await server.until(lambda: server.open == 0)
    assert message == "pictures.example: the fetch was not done within 0.2 s (--media-fetch-timeout-s)"


async def test_a_lookup_that_hangs_is_too_slow() -> None:
    async def resolve(host: str, port: int) -> list[object]:
        await asyncio.Event().wait()
        return []

    config = MediaConfig(media_fetch_timeout_s=0.05)
    media = MediaFetcher(config, resolve=resolve)  # type: ignore[arg-type]
    assert "0.05 s" in await failure(media, "http://slow.example/", ErrorCode.FETCH_FAILED)


async def test_no_more_connections_than_allowed_and_waiting_counts() -> None:
    go = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/hang":
            await exchange.hang_up()
        await go.wait()
        await exchange.reply(BODY)

    async with web(answer) as server:
        url = f"http://127.0.0.1:{server.port}"
        media = fetcher(max_fetches=3)
        jobs = [asyncio.create_task(media.fetch(f"{url}/{n}", reserve=no_account)) for n in range(20)]
        await server.until(lambda: server.open == 3)
        go.set()
        assert await asyncio.gather(*jobs) == [BODY] * 20
        assert (server.connections, server.peak) == (20, 3)

        media = fetcher(timeout_s=0.2, max_fetches=1)
        waits = [failure(media, f"{url}/hang", ErrorCode.FETCH_FAILED) for _ in range(3)]
        assert all("0.2 s" in message for message in await asyncio.gather(*waits))
        assert server.connections == 21  # two of them never had a connection
        assert await fetcher(max_fetches=1).fetch(f"{url}/", reserve=no_account) == BODY


async def test_redirects_are_followed_up_to_a_number() -> None:
    async def answer(exchange: Exchange) -> None:
        left = int(exchange.path[1:])
        statuses = ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
        if left:
            # Absolute, without scheme, and relative, in turn.
            host = exchange.headers["host"]
            where = (f"http://other.example:{host.split(':')[1]}/{left - 1}", f"//{host}/{left - 1}", f"{left - 1}")
            await exchange.redirect(where[left % 3], f"Set-Cookie: sid={SECRET}", status=statuses[left % 5])
        else:
            await exchange.reply(BODY)

    async with web(answer) as server:
        url = f"http://pictures.example:{server.port}"
        assert await fetcher().fetch(f"{url}/{MAX_REDIRECTS}", reserve=no_account) == BODY
        assert len(server.seen) == MAX_REDIRECTS + 1
        for seen in server.seen:
            assert not {"cookie", "authorization", "referer"} & seen.headers.keys()
        message = await failure(fetcher(), f"{url}/{MAX_REDIRECTS + 1}", ErrorCode.FETCH_FAILED)
    assert f"more than {MAX_REDIRECTS} times" in message


async def test_a_redirect_to_itself_ends() -> None:
    async with web(lambda exchange: exchange.redirect(exchange.path)) as server:
        await failure(fetcher(), f"http://127.0.0.1:{server.port}/", ErrorCode.FETCH_FAILED)
    assert server.connections == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    ("location", "code"),
    [
        ("", ErrorCode.FETCH_FAILED),
        ("http://", ErrorCode.FETCH_FAILED),
        ("http://[::1/", ErrorCode.FETCH_FAILED),
        ("http://u:p@127.0.0.1/", ErrorCode.FETCH_FAILED),
        ("http://0x7f.1/", ErrorCode.FETCH_FAILED),
        ("http:\\\\127.0.0.1", ErrorCode.FETCH_FAILED),
        ("/a b", ErrorCode.FETCH_FAILED),
        ("/a\tb", ErrorCode.FETCH_FAILED),
        ("/\xff", ErrorCode.FETCH_FAILED),
        ("file:///etc/hostname", ErrorCode.FETCH_FORBIDDEN),
        ("data:image/png;base64,AAAA", ErrorCode.FETCH_FORBIDDEN),
        ("gopher://127.0.0.1/", ErrorCode.FETCH_FORBIDDEN),
        (f"ftp://127.0.0.1/{SECRET}", ErrorCode.FETCH_FORBIDDEN),
    ],
)
async def test_redirects_that_are_not_followed(location: str, code: ErrorCode) -> None:
    async with web(lambda exchange: exchange.redirect(location)) as server:
        message = await failure(fetcher(), f"http://pictures.example:{server.port}/", code)
    assert message.startswith("pictures.example: ")
    assert server.connections == 1


async def test_cancelling_closes_the_connection() -> None:
    async with web(never) as server:
        job = asyncio.create_task(fetcher().fetch(f"http://127.0.0.1:{server.port}/", reserve=no_account))
        await server.until(lambda: bool(server.seen))
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await server.until(lambda: server.open == 0)


async def test_cancelling_one_that_waits_leaves_its_place_to_others() -> None:
    async with web(lambda exchange: exchange.hang_up() if exchange.path == "/hang" else exchange.reply(BODY)) as server:
        url = f"http://127.0.0.1:{server.port}"
        media = fetcher(max_fetches=1)
        first = asyncio.create_task(media.fetch(f"{url}/hang", reserve=no_account))
        await server.until(lambda: bool(server.seen))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a coroutine that was never awaited
            second = asyncio.create_task(media.fetch(f"{url}/", reserve=no_account))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            del second
            gc.collect()
        first.cancel()
        assert await media.fetch(f"{url}/", reserve=no_account) == BODY


async def test_close_ends_all_fetches_and_refuses_new_ones() -> None:
    async with web(never) as server:
        url = f"http://127.0.0.1:{server.port}/"
        media = fetcher(max_fetches=2)
        jobs = [asyncio.create_task(failure(media, f"{url}{n}", ErrorCode.DRAINING)) for n in range(5)]
        await server.until(lambda: len(server.seen) == 2)
        await media.close()
        await asyncio.gather(*jobs)
        await server.until(lambda: server.open == 0)
        await failure(media, url, ErrorCode.DRAINING)
        await media.close()
        assert server.connections == 2
