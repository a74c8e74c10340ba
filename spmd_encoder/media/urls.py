"""http and https URLs, read strictly: what two readers could take for different hosts is refused, not guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from urllib.parse import quote, urljoin, urlsplit

import idna

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.addresses import Address

_MAX_URL_CHARS = 8192
_MAX_HOST_CHARS = 253
_DEFAULT_PORTS = MappingProxyType({"http": 80, "https": 443})
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NETLOC = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:@]+))(?::(?P<port>[0-9]{0,5}))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# A last label that is a number makes the host an IPv4 address to whoever reads it (also 0x7f.1, 017700000001, 127.1).
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AS_THEY_ARE = "%/:=&?~+!$,;'@()*[]"


@dataclass(frozen=True)
class WebUrl:
    """`host`: lower case, ASCII (IDNA), without brackets or a closing dot. `target`: path and query, escaped."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def address(self) -> Address | None:
        """The host where it is an address and no name."""
        try:
            return IPv6Address(self.host) if ":" in self.host else IPv4Address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def join(self, location: str) -> WebUrl:
        """Where a redirect leads. Raises as `parse_web_url`."""
        _check_characters(location)  # before joining, which drops some of them
        if _SCHEME.match(location):  # urljoin would take "http:x" for a path
            return parse_web_url(location)
        try:
            return parse_web_url(urljoin(f"{self.scheme}://{self.authority}{self.target}", location))
        except ValueError:
            raise _invalid("its host is malformed") from None


def parse_web_url(text: str) -> WebUrl:
    """Raises `EncoderError`: INVALID_REQUEST where it is malformed, FETCH_FORBIDDEN for another scheme."""
    _check_characters(text)
    try:
        parts = urlsplit(text)
    except ValueError:
        raise _invalid("its host is malformed") from None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise EncoderError(ErrorCode.FETCH_FORBIDDEN, "only http and https URLs are fetched")
    if "@" in parts.netloc:
        raise _invalid("it holds a user name, which is not sent; leave out what stands before @")
    match = _NETLOC.fullmatch(parts.netloc)
    if match is None:
        raise _invalid("its host is missing or malformed" if parts.netloc else "it has no host")
    host = canonical_host(match["v6"] or match["name"])
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    if not 1 <= port <= 65535:
        raise _invalid("its port is not 1 to 65535")
    target = quote(parts.path or "/", _AS_THEY_ARE) + (f"?{quote(parts.query, _AS_THEY_ARE)}" if parts.query else "")
    return WebUrl(scheme, host, port, target)


def canonical_host(name: str) -> str:
    """A host name or an address as `WebUrl.host` has it. Raises `EncoderError` INVALID_REQUEST."""
    if ":" in name:
        return _ipv6(name)
    if len(name) > _MAX_HOST_CHARS + 1:
        raise _invalid("its host name is too long")
    host = name.lower()
    if not host.isascii():
        try:
            host = idna.encode(host).decode()
        except idna.IDNAError:
            raise _invalid("its host name is not a valid international name") from None
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > _MAX_HOST_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        raise _invalid("its host name is malformed")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise _invalid("its host is a number; write an IPv4 address as four decimal numbers") from None
    return host


def _ipv6(text: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        raise _invalid("its IPv6 address is malformed") from None


def _check_characters(text: str) -> None:
    if len(text) > _MAX_URL_CHARS:
        raise _invalid(f"it has more than {_MAX_URL_CHARS} characters")
    if not text.isprintable() or " " in text or "\\" in text:
        raise _invalid("it holds a space, a backslash or a control character; escape it with %")


def _invalid(why: str) -> EncoderError:
    return EncoderError(ErrorCode.INVALID_REQUEST, f"the URL cannot be used: {why}")
