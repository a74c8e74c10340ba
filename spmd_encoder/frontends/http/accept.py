"""Which of the formats that a route writes a client prefers, by its Accept header (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

# More ranges than any client sends; the rest is not looked at.
_MAX_RANGES = 64


def preferred(request: Request, formats: Sequence[str]) -> str:
    """The one of `formats` (media types, lower case) with the highest quality; among equals one that is named rather
    than matched by a wildcard, then the first. So `*/*`, no header, and a header that allows none give the first.
    """
    accepted = ",".join(request.headers.getlist("accept"))
    if accepted in formats:
        return accepted
    ranges = _ranges(accepted)
    scores = [_score(name, ranges) for name in formats]
    return formats[scores.index(max(scores))]


def _ranges(header: str) -> dict[str, float]:
    """Quality by media range. What cannot be read is left out."""
    found: dict[str, float] = {}
    for part in header.split(",", _MAX_RANGES)[:_MAX_RANGES]:
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            value = float(quality)
        except ValueError:
            continue
        if name and 0.0 <= value <= 1.0:
            found[name] = value
    return found


def _score(name: str, ranges: dict[str, float]) -> tuple[float, int]:
    """(quality, how closely the range that decides it names `name`)."""
    for closeness, pattern in ((2, name), (1, name.partition("/")[0] + "/*"), (0, "*/*")):
        if pattern in ranges:
            return ranges[pattern], closeness if ranges[pattern] else 0
    return 0.0, 0
