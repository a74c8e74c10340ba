"""What a call of the client can raise; one base class, `EncoderClientError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_encoder.client.results import Result

_MOST_NAMED = 5


class EncoderClientError(Exception):
    """Base of all errors of the client. `message` is one or two sentences for a person.

    All can be copied, and so passed between processes: the message alone makes one, the rest are attributes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NoReplyError(EncoderClientError):
    """The server could not be reached, or broke the connection before its reply was whole, in every attempt."""


class NoReplyInTimeError(EncoderClientError):
    """The call's `timeout_s` was over before there was a reply."""


class BadReplyError(EncoderClientError):
    """There was a reply, and it is not what this API answers: another server, a proxy, a damaged body."""


class RefusedError(EncoderClientError):
    """The server answered a whole request with an error.

    `code` is the server's stable code (`INVALID_REQUEST`, ...; `HTTP_502` and the like where the reply has none),
    `param` the part of the request that it names, `request_id` what the server's log calls the request,
    `retry_after_s` the server's wish where it has one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "",
        param: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} ({self.code}, HTTP {self.status}, request {self.request_id or 'without an id'})"


class BusyError(RefusedError):
    """429 or 503, also after the retries: overloaded, not ready or draining."""


class ItemError(EncoderClientError):
    """Why one picture has no embedding.

    `code` is the server's (`MEDIA_CORRUPT`, `TOO_LARGE`, ...), or `UNREADABLE` where the file could not be read or
    the picture not be written as PNG here. `index` counts the call's pictures; `name` is the path or URL, or
    `images[3]` where it has none.
    """

    def __init__(
        self, message: str, *, code: str = "", index: int = -1, name: str = "", request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.index = index
        self.name = name
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.name}: {self.message} ({self.code})"


class ItemsFailedError(EncoderClientError):
    """Some pictures failed. `errors` has them, `results` every picture's outcome, so that no embedding is lost."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = list(results)
        self.errors = [result.error for result in results if result.error is not None]
        named = "; ".join(str(error) for error in self.errors[:_MOST_NAMED])
        more = f"; and {len(self.errors) - _MOST_NAMED} more" if len(self.errors) > _MOST_NAMED else ""
        super().__init__(f"{len(self.errors)} of {len(self.results)} pictures failed: {named}{more}")

    def __reduce__(self) -> tuple[type[ItemsFailedError], tuple[list[Result]]]:
        return type(self), (self.results,)
