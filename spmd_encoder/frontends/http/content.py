"""What a request's body is by its Content-Type, and whether a foreign web page may have sent it."""

from __future__ import annotations

from enum import Enum
from urllib.parse import urlsplit

from starlette.requests import Request

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.errors import HttpError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MODALITIES = {m.value: m for m in Modality}


class BodyKind(Enum):
    """The value says what to send, in an error's words."""

    JSON = "application/json"
    MULTIPART = "multipart/form-data"
    RAW = "image/*, audio/*, video/* or application/octet-stream (one file)"


def body_kind(request: Request, *kinds: BodyKind) -> BodyKind:
    """Which of `kinds` the body is; a missing type is taken as JSON.

    This API may listen on a developer's loopback address, where any web page in the developer's browser can reach it.
    A browser asks the server first (a preflight, which is never granted here) unless the body is of a type that an
    HTML form can send: multipart/form-data, application/x-www-form-urlencoded, text/plain, or none at all. So of
    these only multipart and a missing type are read, and only where no browser sent them for a page of another
    origin (`check_same_origin`).

    Raises `EncoderError` MEDIA_UNSUPPORTED for another type or a compressed body, `HttpError` 403.
    """
    given = request.headers.get("content-type")
    kind = BodyKind.JSON if given is None else _kind_of(given)
    if kind not in kinds:
        accepted = " or ".join(kind.value for kind in kinds)
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, f"the body must be sent as Content-Type: {accepted}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "a compressed body (Content-Encoding) is not supported")
    if given is None or kind is BodyKind.MULTIPART:
        check_same_origin(request)
    return kind


def _kind_of(content_type: str) -> BodyKind | None:
    name = content_type.partition(";")[0].strip().lower()
    if name == "application/json" or (name.startswith("application/") and name.endswith("+json")):
        return BodyKind.JSON
    if name == "multipart/form-data":
        return BodyKind.MULTIPART
    if name == "application/octet-stream" or _modality_of(name) is not None:
        return BodyKind.RAW
    return None


def declared_modality(request: Request) -> Modality | None:
    """What a raw body is said to be, None where only its content tells."""
    return _modality_of(request.headers.get("content-type", "").strip().lower())


def _modality_of(content_type: str) -> Modality | None:
    kind, slash, _ = content_type.partition("/")
    return _MODALITIES.get(kind) if slash else None


def check_same_origin(request: Request) -> None:
    """Refuse what a browser sent for a page of another origin. Raises `HttpError` 403.

    Programs send neither header and pass. `Sec-Fetch-Site` is the browser's own word, which no page can change; it
    decides where it is there, since a proxy may have rewritten Host. Older browsers, and all on plain http to another
    machine, send `Origin` alone: it must name the host and port that the request was sent to. Schemes are not
    compared, because TLS may end at a proxy.
    """
    sites = request.headers.getlist("sec-fetch-site")
    if sites:
        allowed = all(site.strip().lower() in {"same-origin", "none"} for site in sites)
    else:
        host = request.headers.get("host", "")
        allowed = all(_is_origin_of(origin, host) for origin in request.headers.getlist("origin"))
    if not allowed:
        raise HttpError(
            403,
            "CROSS_ORIGIN",
            "a web page of another origin may not send this; only pages of this server, and programs, may",
        )


def _is_origin_of(origin: str, host: str) -> bool:
    try:
        page, own = urlsplit(origin.strip()), urlsplit(f"//{host.strip()}")
        default = _DEFAULT_PORTS.get(page.scheme)
        if default is None or page.hostname is None:  # "null", or an application's own scheme
            return False
        return (page.hostname, page.port or default) == (own.hostname, own.port or default)
    except ValueError:
        return False
