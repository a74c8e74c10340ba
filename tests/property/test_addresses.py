"""No address that is not public is reached, however it is written."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.addresses import forbidden_kind
from spmd_encoder.media.urls import WebUrl, parse_web_url

inner4 = st.ip_addresses(v=4).filter(lambda address: not address.is_global)
inner6 = st.ip_addresses(v=6).filter(lambda address: not address.is_global)
ports = st.sampled_from(["", ":80", ":8080", ":"])


def refused(host: str, port: str = "") -> bool:
    """Whether a URL with this host is malformed, or names an address that is forbidden; a name is not refused here."""
    try:
        url = parse_web_url(f"http://{host}{port}/")
    except EncoderError as error:
        assert error.code is ErrorCode.INVALID_REQUEST
        return True
    return url.address is not None and forbidden_kind(url.address) is not None


def part(number: int, base: int) -> str:
    return {8: f"0{number:o}", 10: str(number), 16: f"0x{number:x}"}[base]


@st.composite
def spellings4(draw: st.DrawFn, address: IPv4Address) -> str:
    """What inet_aton reads as `address`: one to four numbers, each in one of three bases."""
    count = draw(st.integers(1, 4))
    octets = list(address.packed)
    numbers = [*octets[: count - 1], int.from_bytes(octets[count - 1 :], "big")]
    text = ".".join(part(number, draw(st.sampled_from([8, 10, 16]))) for number in numbers)
    assert socket.inet_aton(text) == address.packed
    return draw(st.sampled_from([text, text.upper().replace("0X", "0x"), text.upper(), f"{text}.", f"user@{text}"]))


@given(inner4, st.data(), ports)
def test_inner_ipv4_in_every_spelling(address: IPv4Address, data: st.DataObject, port: str) -> None:
    assert forbidden_kind(address) is not None
    assert refused(data.draw(spellings4(address)), port)


@given(inner4, ports)
@example(IPv4Address("169.254.169.254"), "")
def test_inner_ipv4_inside_ipv6(address: IPv4Address, port: str) -> None:
    number = int(address)
    for high in (0xFFFF << 32, 0, 0xFFFF << 48, 0x64FF9B << 96, (0x64FF9B0001 << 80)):
        embedded = IPv6Address(high | number)
        assert forbidden_kind(embedded) is not None, embedded
        assert refused(f"[{embedded}]", port)
    for tunnel in (
        0x2002 << 112 | number << 80,
        0x20010000 << 96 | number << 64,
        0x20010000 << 96 | number ^ 0xFFFFFFFF,
    ):
        assert forbidden_kind(IPv6Address(tunnel)) is not None
    for text in (f"[::ffff:{address}]", f"[::FFFF:{address}]", f"[64:ff9b::{address}]", f"[::{address}]"):
        assert refused(text, port)


@given(inner6, ports)
@example(IPv6Address("fd00:ec2::254"), "")
def test_inner_ipv6_in_every_spelling(address: IPv6Address, port: str) -> None:
    assert forbidden_kind(address) is not None
    for text in (str(address), address.exploded, str(address).upper(), address.exploded.upper()):
        for host in (
            f"[{text}]",
            f"[{text}%25eth0]",
            f"[{text}%eth0]",
            text,
            f"user@[{text}]",
            f"[{text}].",
            f"[{text}]x",
        ):
            assert refused(host, port)


@pytest.mark.parametrize(
    "network",
    [
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
        *("192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
        *(
            "::/96",
            "::ffff:0:0/96",
            "100::/64",
            "2001::/23",
            "2001:db8::/32",
            "2002::/16",
            "fc00::/7",
            "fe80::/9",
            "ff00::/8",
        ),
    ],
)
def test_special_networks_from_end_to_end(network: str) -> None:
    net = ip_network(network)
    for address in (net[0], net[1], net[net.num_addresses // 2], net[-1]):
        assert forbidden_kind(address) is not None


@given(st.ip_addresses(v=4, network="8.0.0.0/7") | st.ip_addresses(v=6, network="2600::/12"))
def test_public_addresses_stay_what_they_are(address: IPv4Address | IPv6Address) -> None:
    assert forbidden_kind(address) is None
    url = parse_web_url(f"https://{f'[{address.exploded}]' if address.version == 6 else address}/")
    assert url.address == address


hosts = st.from_regex(r"[a-z0-9_]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]{2,5}){0,2}", fullmatch=True)
web_urls = st.builds(
    WebUrl,
    scheme=st.sampled_from(["http", "https"]),
    host=hosts.filter(lambda host: not host[-1].isdigit()),
    port=st.integers(1, 65535),
    target=st.from_regex(r"/[A-Za-z0-9/._~%=&-]{0,20}(\?[A-Za-z0-9?/=&]{1,20})?", fullmatch=True),
)


@given(web_urls)
def test_a_url_survives_its_own_text(url: WebUrl) -> None:
    assert parse_web_url(f"{url.scheme}://{url.authority}{url.target}") == url
    assert url.join(url.target.replace("//", "/x")).host == url.host


@given(st.text(max_size=60) | st.text("htps:/@[]%.0x17\\?# a", max_size=40).map(lambda tail: f"http://{tail}"))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        url = parse_web_url(text)
    except EncoderError as error:
        assert error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.FETCH_FORBIDDEN)
        assert error.message.isprintable()
        return
    for part in (url.host, url.target, url.authority):
        assert part.isascii()
        assert part.isprintable()
        assert not set(part) & set(" \\@") - {"@" if part is url.target else ""}
    assert "/" not in url.authority
