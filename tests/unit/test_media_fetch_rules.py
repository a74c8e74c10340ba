"""Where media may be fetched from: addresses, names, domains, at every hop."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

import pytest

from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.addresses import Address, forbidden_kind
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.media.fetch import MediaFetcher
from spmd_encoder.media.http_fetch import HttpFetch
from spmd_encoder.media.network import system_resolver
from spmd_encoder.media.urls import parse_web_url
from spmd_encoder.media_flags import MediaConfig
from tests.harness.web import Exchange, Names, web

BODY = b"a picture, perhaps"


PUBLIC = "93.184.215.14"


def no_account(num_bytes: int) -> None:
    pass


def answer(exchange: Exchange) -> object:
    return exchange.reply(BODY)


async def failure(media: MediaFetcher, url: str) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        await media.fetch(url, reserve=no_account)
    return caught.value


async def by_libc(host: str, port: int) -> Sequence[Address]:
    """What the system makes of a host, as a careless fetcher would ask it."""
    return await system_resolver(DaemonThreads(1))(host, port)


SPELLINGS = [
    *(
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
    ),
    *(
        "127.0.0.01",
        "0x7f.0x0.0x0.0x1",
        "0X7F.1",
        "127.0.0.0x1",
        "0",
        "0.0.0.0",
        "0x",
        "localhost",
        "localhost.",
        "LOCALHOST",
    ),
    *(
        "[::1]",
        "[::]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[::FFFF:7F00:1]",
    ),
    *(
        "[64:ff9b::127.0.0.1]",
        "[2002:7f00:1::]",
        "[::1%25lo]",
        "[::1%lo]",
        "[fe80::1%25eth0]",
        "127.0.0.1%00",
        "%31%32%37.0.0.1",
    ),
    *("good@127.0.0.1", "good:pass@127.0.0.1", "good.example@127.0.0.1", "127.0.0.1@good.example", "@127.0.0.1"),
    *(
        "good.example#@127.0.0.1",
        "good.example\\@127.0.0.1",
        "good.example%2f@127.0.0.1",
        "127。0。0。1",
        "１２７.0.0.1",
    ),
    *(
        "ⓛocalhost",
        "①②⑦.0.0.1",
        "127.0.0.1\t",
        " 127.0.0.1",
        "127.0.0.1 ",
        "127.0.0.1\r\nX: y",
        "127.0.0.1\\",
        "127.0.0.1\0",
    ),
    *(
        "",
        ".",
        "..",
        "127.0.0.1..",
        "[]",
        "[::1",
        "::1",
        "[::1]x",
        "[127.0.0.1]",
        "[v1.x]",
        "xn--",
        "a..b",
        "-",
        "\ud800",
    ),
]


@pytest.mark.parametrize("host", SPELLINGS, ids=ascii)
async def test_no_spelling_gets_inside(host: str) -> None:
    async with web(answer) as server, web(answer, "::1") as server6:
        for port in (server.port, server6.port):
            media = MediaFetcher(MediaConfig(), resolve=by_libc)
            for url in (f"http://{host}:{port}/x", f"http://{host}/x", f"HTTPS://{host}:{port}/x"):
                error = await failure(media, url)
                # "good.example#@..." is the host good.example, which no resolver of these tests has to know.
                allowed = {ErrorCode.INVALID_REQUEST, ErrorCode.FETCH_FORBIDDEN}
                assert error.code in allowed | ({ErrorCode.FETCH_FAILED} if "#" in host else set()), error.message
                assert error.message.isprintable()
        assert server.connections == server6.connections == 0


@pytest.mark.parametrize(
    "address",
    [
        *("10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.1", "169.254.169.254", "169.254.1.1", "100.64.0.1"),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "239.1.2.3", "240.0.0.1"),
        *("255.255.255.255", "0.1.2.3", "192.0.2.1", "192.88.99.1", "fd00:ec2::254", "fc00::1", "fe80::1", "fec0::1"),
        *(
            "ff02::1",
            "64:ff9b::a00:1",
            "64:ff9b:1::a00:1",
            "2002:a00:1::",
            "2001:0:a00:1::",
            "::10.0.0.1",
            "2001:db8::1",
        ),
        *("::ffff:0:10.0.0.1", "5f00::1", "3fff::1", "100::1", "4000::1"),
    ],
)
async def test_a_name_for_an_inner_address(address: str) -> None:
    media = MediaFetcher(MediaConfig(), resolve=Names(inner_example=[address]))
    error = await failure(media, "http://inner.example/?secret")
    assert error.code is ErrorCode.FETCH_FORBIDDEN
    assert error.message.startswith("inner.example: ")
    assert "--allow-private-media-hosts" in error.message
    assert address not in error.message  # what inner names stand for is nobody's business


@pytest.mark.parametrize(
    "address", [PUBLIC, "8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    url = parse_web_url(f"http://[{address}]/" if ":" in address else f"http://{address}/")
    assert url.address is not None
    assert forbidden_kind(url.address) is None


@pytest.mark.parametrize("addresses", [[PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], [PUBLIC, "2606:4700::1", "::1"]])
async def test_one_inner_address_among_public_ones_forbids_the_name(addresses: list[str]) -> None:
    async with web(answer) as server:
        media = MediaFetcher(MediaConfig(), resolve=Names(mixed_example=addresses))
        error = await failure(media, f"http://mixed.example:{server.port}/")
        assert server.connections == 0
    assert error.code is ErrorCode.FETCH_FORBIDDEN


async def test_the_address_that_was_checked_is_the_one_connected_to() -> None:
    """DNS rebinding: the second answer would lead elsewhere."""
    names = Names(rebind_example=[["127.0.0.1"], ["127.0.0.2"]])
    async with web(answer) as server:
        http = HttpFetch(
            resolve=names,
            ssl_context=ssl.create_default_context,
            forbidden=only("127.0.0.1"),
            domains=frozenset(),
            max_bytes=None,
        )
        url = parse_web_url(f"http://rebind.example:{server.port}/")
        assert await http.fetch(url, no_account) == BODY
        assert names.asked == ["rebind.example"]
        assert server.seen[0].headers["host"] == f"rebind.example:{server.port}"
        with pytest.raises(EncoderError) as caught:  # the same name, later
            await http.fetch(url, no_account)
        assert caught.value.code is ErrorCode.FETCH_FORBIDDEN
        assert server.connections == 1


def only(public: str) -> object:
    """The usual rule, but for one address that is as good as public."""
    return lambda address: None if str(address) == public else forbidden_kind(address)


@pytest.mark.parametrize(
    "location",
    [
        *(
            "http://127.0.0.2/",
            "http://localhost/",
            "//[::1]/",
            "http://169.254.169.254/latest/meta-data",
            "//inner.example/",
        ),
        *("http://mixed.example/", "//10.0.0.1:80/"),
    ],
)
async def test_every_hop_is_checked(location: str) -> None:
    names = Names(
        outer_example=["127.0.0.1"], inner_example=["10.0.0.1"], mixed_example=["127.0.0.1", "::1"], localhost=["::1"]
    )

    async def redirect_twice(exchange: Exchange) -> None:
        await exchange.redirect("/second" if exchange.path == "/first" else location)

    async with web(redirect_twice) as server:
        http = HttpFetch(
            resolve=names,
            ssl_context=ssl.create_default_context,
            forbidden=only("127.0.0.1"),
            domains=frozenset(),
            max_bytes=None,
        )
        with pytest.raises(EncoderError) as caught:
            await http.fetch(parse_web_url(f"http://outer.example:{server.port}/first"), no_account)
        assert server.connections == 2
    assert caught.value.code is ErrorCode.FETCH_FORBIDDEN


def domains(*allowed: str) -> MediaFetcher:
    config = MediaConfig(allow_private_media_hosts=True, allowed_media_domains=allowed)
    names = Names(
        **{"good_example": ["127.0.0.1"], "evil_example": ["127.0.0.1"], "xn--ber-goa_example": ["127.0.0.1"]}
    )
    return MediaFetcher(config, resolve=names)


@pytest.mark.parametrize("host", ["good.example", "GOOD.example.", "über.example", "xn--ber-goa.example", "127.0.0.1"])
async def test_allowed_domains(host: str) -> None:
    async with web(answer) as server:
        media = domains("Good.Example", "ÜBER.example", "127.0.0.1")
        assert await media.fetch(f"http://{host}:{server.port}/", reserve=no_account) == BODY


@pytest.mark.parametrize(
    "host", ["evil.example", "sub.good.example", "good.example.evil.example", "evilgood.example", "127.0.0.1"]
)
async def test_other_domains(host: str) -> None:
    async with web(answer) as server:
        error = await failure(domains("good.example"), f"http://{host}:{server.port}/")
        assert server.connections == 0
    assert error.code is ErrorCode.FETCH_FORBIDDEN
    assert "--allowed-media-domains" in error.message


async def test_allowed_domains_hold_for_redirects() -> None:
    async def redirect(exchange: Exchange) -> None:
        port = exchange.headers["host"].split(":")[1]
        where = {"/good": f"//good.example:{port}/body", "/evil": f"//evil.example:{port}/body"}
        await (exchange.redirect(where[exchange.path]) if exchange.path in where else exchange.reply(BODY))

    async with web(redirect) as server:
        media, url = domains("good.example"), f"http://good.example:{server.port}"
        assert await media.fetch(f"{url}/good", reserve=no_account) == BODY
        error = await failure(media, f"{url}/evil")
    assert error.code is ErrorCode.FETCH_FORBIDDEN
    assert error.message.startswith("evil.example: ")


async def test_an_allowed_domain_does_not_lift_the_address_rule() -> None:
    config = MediaConfig(allowed_media_domains=("inner.example",))
    error = await failure(MediaFetcher(config, resolve=Names(inner_example=["10.0.0.1"])), "http://inner.example/")
    assert "--allow-private-media-hosts" in error.message


@pytest.mark.parametrize("entry", ["a..b", "-", "1.2.3", "x" * 300, "1:2:3"])
def test_a_domain_that_is_none_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(StartupError, match="--allowed-media-domains") as caught:
        MediaFetcher(MediaConfig(allowed_media_domains=("good.example", entry)))
    assert caught.value.exit_code == 2


async def test_the_system_resolver_knows_localhost() -> None:
    found = await system_resolver(DaemonThreads(1))("localhost", 80)
    assert found
    assert all(forbidden_kind(address) == "a loopback address" for address in found)
    with pytest.raises(socket.gaierror):
        await system_resolver(DaemonThreads(1))("no-such-name.invalid", 80)
