"""What SGLang's language servers are told of a failure: one of the statuses that its own encoder gives, and a text."""

from __future__ import annotations

from types import MappingProxyType

from spmd_encoder.errors import EncoderError, ErrorCode

STATUS = MappingProxyType(
    {
        ErrorCode.INVALID_REQUEST: 400,
        ErrorCode.MODEL_NOT_FOUND: 400,
        ErrorCode.TOO_LARGE: 400,
        ErrorCode.MEDIA_UNSUPPORTED: 400,
        ErrorCode.MEDIA_CORRUPT: 400,
        ErrorCode.FETCH_FORBIDDEN: 400,
        ErrorCode.FETCH_FAILED: 400,
        ErrorCode.NOT_FOUND: 400,
        ErrorCode.QUEUE_FULL: 503,
        ErrorCode.OVERLOADED: 503,
        ErrorCode.NOT_READY: 503,
        ErrorCode.DRAINING: 503,
        ErrorCode.CANCELLED: 503,
        ErrorCode.DEADLINE_EXCEEDED: 504,
        ErrorCode.DELIVERY_FAILED: 502,
        ErrorCode.WORKER_DIED: 500,
        ErrorCode.NON_FINITE: 500,
        ErrorCode.INTERNAL: 500,
    }
)


class RefusalError(Exception):
    """`status` is an HTTP status, which SGLang passes on to its user; `message` is never empty."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        # A receiver takes an empty text for success.
        self.message = message or "the encoder failed and does not know why"
        super().__init__(self.message)

    @classmethod
    def of(cls, error: EncoderError) -> RefusalError:
        where = f"{error.param}: " if error.param else ""
        return cls(STATUS[error.code], where + error.message if error.message else str(error.code))
