"""How long a caller wants to wait: a header in seconds, or an option in milliseconds, from the request's headers on.

Both only shorten what the server grants (`--request-timeout-s`), so any value that is too large does no harm.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from starlette.requests import Request

from spmd_encoder.errors import EncoderError, ErrorCode

HEADER = "x-request-timeout"
HEADER_PATTERN = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"
MAX_DEADLINE_MS = 10**9
DeadlineMs = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEADLINE_MS)]

_SECONDS = re.compile(HEADER_PATTERN.removesuffix("$") + r"\Z", re.ASCII)


def header_timeout_s(request: Request) -> float | None:
    """What `X-Request-Timeout` says. Raises `EncoderError` INVALID_REQUEST."""
    given = request.headers.getlist(HEADER)
    if not given:
        return None
    text = given[0].strip()
    if len(given) > 1 or not _SECONDS.match(text) or not float(text):
        raise EncoderError(
            ErrorCode.INVALID_REQUEST, "X-Request-Timeout is one number of seconds above 0, as in 2.5", param=HEADER
        )
    return float(text)
