"""One file over http or https: from a checked address, within limits, through checked redirects."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence

import httpcore

from spmd_encoder import __version__
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.addresses import Address
from spmd_encoder.media.network import CONNECT_TIMEOUT_S, CheckedNetwork, Resolver, why_not_connected
from spmd_encoder.media.urls import WebUrl

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# One file per connection, plain, and nothing that names the user: no cookies, no credentials, no referrer.
_HEADERS = (
    ("User-Agent", f"spmd_encoder/{__version__}"),
    ("Accept", "*/*"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)


class HttpFetch:
    """The rules for where media come from; `fetch` holds one URL and each of its redirects to them.

    `forbidden` says why an address may not be connected to, or None. No `domains` means any. `ssl_context` is asked
    for when the first https URL comes.
    """

    def __init__(
        self,
        *,
        resolve: Resolver,
        ssl_context: Callable[[], ssl.SSLContext],
        forbidden: Callable[[Address], str | None],
        domains: frozenset[str],
        max_bytes: int | None,
    ) -> None:
        self._resolve = resolve
        self._ssl_context = ssl_context
        self._forbidden = forbidden
        self._domains = domains
        self._max_bytes = max_bytes

    async def fetch(self, url: WebUrl, reserve: Callable[[int], None]) -> bytes:
        """Raises `EncoderError`: FETCH_FORBIDDEN, FETCH_FAILED or TOO_LARGE, and what `reserve` raises."""
        for _ in range(MAX_REDIRECTS + 1):
            addresses = await self._checked_addresses(url)
            body = await self._get(url, addresses, reserve)
            if not isinstance(body, WebUrl):
                return body
            url = body
        raise _failed(url, f"it redirects more than {MAX_REDIRECTS} times")

    async def _checked_addresses(self, url: WebUrl) -> Sequence[Address]:
        """Where to connect to: looked up once, so that no second answer can differ from the one checked.

        One forbidden address forbids the name: no honest public host has one, and the outcome does not depend on
        the order of a resolver's answers. The message does not say which address, as inner names are nobody's business.
        """
        if self._domains and url.host not in self._domains:
            raise _forbidden(url, "it is not one of the hosts of --allowed-media-domains")
        addresses: Sequence[Address]
        if (literal := url.address) is not None:
            addresses = [literal]
        else:
            try:
                addresses = await self._resolve(url.host, url.port)
            except OSError:
                addresses = []
        if not addresses:
            raise _failed(url, "there is no host of this name")
        kind = next(filter(None, map(self._forbidden, addresses)), None)
        if kind is not None:
            raise _forbidden(url, f"it is {kind}, or has one; --allow-private-media-hosts would allow it")
        return addresses

    async def _get(self, url: WebUrl, addresses: Sequence[Address], reserve: Callable[[int], None]) -> bytes | WebUrl:
        """The body, or where the reply redirects to."""
        network = CheckedNetwork(addresses)
        target = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        tls = self._ssl_context() if url.scheme == "https" else None
        connection = httpcore.AsyncHTTPConnection(target.origin, tls, network_backend=network)
        headers = [("Host", url.authority), *_HEADERS]
        limits = {"timeout": {"connect": CONNECT_TIMEOUT_S}}
        try:
            async with connection.stream("GET", target, headers=headers, extensions=limits) as response:
                if response.status in _REDIRECTS:
                    return _redirect(url, response)
                return await self._read(url, response, reserve)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise _failed(url, why_not_connected(error)) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
            raise _failed(url, "the connection broke off, or the reply is not proper HTTP") from None
        finally:
            # httpcore leaves a socket to the garbage collector when it is cancelled during the TLS handshake.
            await network.aclose()

    async def _read(self, url: WebUrl, response: httpcore.Response, reserve: Callable[[int], None]) -> bytes:
        if response.status != 200:
            raise _failed(url, f"it answered with status {response.status}")
        if _header(response, b"content-encoding").lower() not in (b"", b"identity"):
            raise _failed(url, "it sent a compressed reply (Content-Encoding), which was not asked for")
        length = _header(response, b"content-length")
        self._check_size(url, int(length) if length.isdigit() else 0)
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in response.aiter_stream():
                size += len(chunk)
                self._check_size(url, size)
                reserve(len(chunk))
                chunks.append(chunk)
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):  # OSError: TLS, too
            raise _failed(url, f"the connection broke off after {size} bytes") from None
        if not size:
            raise _failed(url, "the reply has no content")
        return b"".join(chunks)

    def _check_size(self, url: WebUrl, num_bytes: int) -> None:
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise EncoderError(
                ErrorCode.TOO_LARGE,
                f"{url.host}: the file has more than {self._max_bytes // 2**20} MiB (--media-url-max-file-size-mb)",
            )


def _redirect(url: WebUrl, response: httpcore.Response) -> WebUrl:
    location = _header(response, b"location")
    if not location:
        raise _failed(url, f"it answered with status {response.status} and no Location")
    try:
        target = url.join(location.decode())
    except UnicodeDecodeError:
        raise _failed(url, "it redirects to a malformed URL") from None
    except EncoderError as error:
        if error.code is ErrorCode.FETCH_FORBIDDEN:
            raise _forbidden(url, f"it redirects; {error.message}") from None
        raise _failed(url, f"it redirects; {error.message}") from None
    if url.scheme == "https" and target.scheme != "https":
        raise _forbidden(url, "it redirects from https to http")
    return target


def _header(response: httpcore.Response, name: bytes) -> bytes:
    """All values of a header in one, or nothing."""
    return b", ".join(value for key, value in response.headers if key.lower() == name)


def _failed(url: WebUrl, why: str) -> EncoderError:
    return EncoderError(ErrorCode.FETCH_FAILED, f"{url.host}: {why}")


def _forbidden(url: WebUrl, why: str) -> EncoderError:
    return EncoderError(ErrorCode.FETCH_FORBIDDEN, f"{url.host}: {why}")
