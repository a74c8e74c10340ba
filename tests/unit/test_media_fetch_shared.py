"""Equal URLs at the same time: one fetch for all who want it, and nothing of it afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from spmd_encoder.config import MediaConfig
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.fetch import MediaFetcher
from tests.harness.web import Exchange, Names, web

pytestmark = pytest.mark.timeout(20)

BODY = bytes(range(256)) * 400
HALF = len(BODY) // 2
NAMES = {"pictures_example": ["127.0.0.1"]}


class Account:
    """One caller's, with room for `most` bytes."""

    def __init__(self, most: int = 2**30) -> None:
        self.most = most
        self.bytes = 0
        self.grew = asyncio.Event()

    def add(self, num_bytes: int) -> None:
        if self.bytes + num_bytes > self.most:
            raise EncoderError(ErrorCode.OVERLOADED, "no more room")
        self.bytes += num_bytes
        self.grew.set()


class Slow:
    """A server that sends the second half of a body when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.fails = False

    async def __call__(self, exchange: Exchange) -> None:
        if self.fails:
            await exchange.reply(b"gone", "404 Not Found")
            return
        await exchange.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:HALF])
        await self.go.wait()
        await exchange.send(BODY[HALF:])


def fetcher(timeout_s: float = 20.0, root: Path | None = None) -> MediaFetcher:
    config = MediaConfig(
        allow_private_media_hosts=True,
        media_fetch_timeout_s=timeout_s,
        allowed_local_media_path=None if root is None else str(root),
    )
    return MediaFetcher(config, resolve=Names(**NAMES))


def start(media: MediaFetcher, url: str, account: Account | None = None) -> asyncio.Task[bytes]:
    return asyncio.create_task(media.fetch(url, reserve=(account or Account()).add))


async def test_one_fetch_for_all_spellings_of_a_url_and_each_pays_for_all_of_it() -> None:
    slow, media = Slow(), fetcher()
    async with web(slow) as server:
        accounts = [Account() for _ in range(4)]
        first = start(media, f"http://pictures.example:{server.port}/ä?q=1", accounts[0])
        await accounts[0].grew.wait()
        same = [f"HTTP://Pictures.EXAMPLE.:{server.port}/%C3%A4?q=1#{n}" for n in range(3)]
        others = [start(media, url, account) for url, account in zip(same, accounts[1:], strict=True)]
        for account in accounts[1:]:
            await account.grew.wait()
        slow.go.set()
        got = await asyncio.gather(first, *others)
    assert all(body is got[0] for body in got)
    assert got[0] == BODY
    assert [account.bytes for account in accounts] == [len(BODY)] * 4
    assert len(server.seen) == 1


async def test_other_urls_are_other_fetches() -> None:
    async with web(lambda exchange: exchange.reply(BODY)) as server:
        media, base = fetcher(), f"http://pictures.example:{server.port}"
        await asyncio.gather(*(start(media, base + path) for path in ("/a", "/A", "/a?", "/a?q", "/a/", "/b")))
    assert sorted(seen.path for seen in server.seen) == ["/A", "/a", "/a/", "/a?q", "/b"]


async def test_nothing_is_kept() -> None:
    async with web(lambda exchange: exchange.reply(BODY)) as server:
        media, url = fetcher(), f"http://pictures.example:{server.port}/"
        for _ in range(3):
            assert await start(media, url) == BODY
    assert len(server.seen) == 3


async def test_a_failure_is_everybodys_who_waits_and_is_not_remembered() -> None:
    slow, media = Slow(), fetcher()
    async with web(slow) as server:
        url = f"http://pictures.example:{server.port}/"
        slow.fails = True
        failures = await asyncio.gather(*(start(media, url) for _ in range(3)), return_exceptions=True)
        assert [str(failure) for failure in failures] == ["pictures.example: it answered with status 404"] * 3
        assert len({id(failure) for failure in failures}) == 3, "each has its own"
        assert len(server.seen) == 1
        slow.fails = False
        slow.go.set()
        assert await start(media, url) == BODY


@pytest.mark.parametrize("leaver", [0, 1])
async def test_one_who_leaves_does_not_end_the_others_fetch(leaver: int) -> None:
    slow, media = Slow(), fetcher()
    async with web(slow) as server:
        url, accounts = f"http://pictures.example:{server.port}/", [Account(), Account()]
        callers = [start(media, url, account) for account in accounts]
        for account in accounts:
            await account.grew.wait()
        callers[leaver].cancel()
        with pytest.raises(asyncio.CancelledError):
            await callers[leaver]
        slow.go.set()
        assert await callers[1 - leaver] == BODY
    assert accounts[leaver].bytes <= HALF
    assert len(server.seen) == 1


async def test_with_the_last_one_the_fetch_ends_and_the_next_begins_anew() -> None:
    slow, media = Slow(), fetcher()
    async with web(slow) as server:
        url, account = f"http://pictures.example:{server.port}/", Account()
        callers = [start(media, url, account) for _ in range(2)]
        await account.grew.wait()
        for caller in callers:
            caller.cancel()
        again = start(media, url)
        await asyncio.gather(*callers, return_exceptions=True)
        slow.go.set()
        assert await again == BODY
        await server.until(lambda: server.open == 0)
    assert len(server.seen) == 2


@pytest.mark.parametrize("late", [False, True])
async def test_one_without_room_fails_alone(late: bool) -> None:
    slow, media = Slow(), fetcher()
    async with web(slow) as server:
        url, account, small = f"http://pictures.example:{server.port}/", Account(), Account(HALF // 2)
        early = None if late else start(media, url, small)
        other = start(media, url, account)
        await account.grew.wait()
        with pytest.raises(EncoderError, match="no more room") as caught:
            await (early or start(media, url, small))
        assert caught.value.code is ErrorCode.OVERLOADED
        slow.go.set()
        assert await other == BODY
    assert len(server.seen) == 1
    assert small.bytes <= HALF // 2


async def test_where_nobody_has_room_the_fetch_ends() -> None:
    slow, media = Slow(), fetcher()
    async with web(slow) as server:
        url = f"http://pictures.example:{server.port}/"
        callers = [start(media, url, Account(10)) for _ in range(3)]
        failures = await asyncio.gather(*callers, return_exceptions=True)
        assert [str(failure) for failure in failures] == ["no more room"] * 3
        slow.go.set()
        await server.until(lambda: server.open == 0)


async def test_the_end_of_the_server_ends_it_for_all() -> None:
    media = fetcher()
    async with web(Slow()) as server:
        url, account = f"http://pictures.example:{server.port}/", Account()
        callers = [start(media, url, account) for _ in range(3)]
        await account.grew.wait()
        await media.close()
        failures = await asyncio.gather(*callers, return_exceptions=True)
        assert {failure.code for failure in failures if isinstance(failure, EncoderError)} == {ErrorCode.DRAINING}
        assert len(failures) == 3


async def test_files_too(tmp_path: Path) -> None:
    (tmp_path / "ä.png").write_bytes(BODY)
    media, account = fetcher(root=tmp_path), Account()
    urls = [f"file://{tmp_path}/%C3%A4.png", f"FILE://localhost{tmp_path}/ä.png"]
    first, second = await asyncio.gather(*(start(media, url, account) for url in urls))
    assert first is second
    assert account.bytes == 2 * len(BODY)
