"""What can go wrong, in words that belong to no protocol."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable, machine-readable reasons. Front ends map them to their protocol's own codes."""

    INVALID_REQUEST = "INVALID_REQUEST"
    """The request itself is malformed: wrong field, bad base64, unknown option."""
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    """The request names a model that is not served here."""
    TOO_LARGE = "TOO_LARGE"
    """A limit on bytes, pixels or items is exceeded; the message names the limit and its flag."""
    MEDIA_UNSUPPORTED = "MEDIA_UNSUPPORTED"
    """The bytes are of a kind that is not decoded here."""
    MEDIA_CORRUPT = "MEDIA_CORRUPT"
    """The bytes claim to be a supported kind but cannot be decoded, or cannot be encoded by this model."""
    FETCH_FORBIDDEN = "FETCH_FORBIDDEN"
    """A URL or file that this server may not fetch; the message names the flag that would allow it."""
    FETCH_FAILED = "FETCH_FAILED"
    """A URL or file that could not be fetched: no such host, not status 200, cut off, too slow."""
    NOT_FOUND = "NOT_FOUND"
    """An item was named by its digest alone, and no cache holds its result; send the item itself."""
    QUEUE_FULL = "QUEUE_FULL"
    """Too many items wait already; try again later."""
    OVERLOADED = "OVERLOADED"
    """Too many media bytes are in flight; try again later."""
    NOT_READY = "NOT_READY"
    """No replica has been up yet."""
    DRAINING = "DRAINING"
    """The server is shutting down and accepts nothing new."""
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    """The request's time was over before its result was there."""
    CANCELLED = "CANCELLED"
    """The caller has gone."""
    DELIVERY_FAILED = "DELIVERY_FAILED"
    """The embedding is there, but its receiver could not be reached or did not take it."""
    WORKER_DIED = "WORKER_DIED"
    """The item was in flight at two worker deaths, or no replica is left to run it."""
    NON_FINITE = "NON_FINITE"
    """The model produced NaN or infinity for this item."""
    INTERNAL = "INTERNAL"
    """A fault of the server."""


class EncoderError(Exception):
    """One failure of one item or of a whole request.

    `param` names the offending part of the request in the caller's own terms (for example `items[1]`);
    `retry_after_s` is set where trying again later can help. The message never contains media bytes.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"EncoderError({self.code}, {self.message!r}, param={self.param!r})"

    def at(self, param: str | None) -> EncoderError:
        """The same failure, said of `param`."""
        return EncoderError(self.code, self.message, param=param, retry_after_s=self.retry_after_s)

    def again(self) -> EncoderError:
        """The same failure as a new exception, whose traceback holds nothing yet."""
        return self.at(self.param)


def time_over(stage: str) -> EncoderError:
    """DEADLINE_EXCEEDED. `stage` is where the time was over: receive, fetch, queue, preprocess, forward, delivery."""
    return EncoderError(
        ErrorCode.DEADLINE_EXCEEDED,
        f"the request's time was over in the stage {stage} (the caller's own limit, or else --request-timeout-s)",
    )


class StartupError(Exception):
    """The rank cannot start. `exit_code`: 1 start-up failure, 2 usage, 3 port or rendezvous."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
