"""How failures look over gRPC: one status per `ErrorCode`, and google.rpc details that hold the code itself.

RESOURCE_EXHAUSTED and UNAVAILABLE are kept for what may be tried again: clients do that by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.sglang.refusal import RefusalError

STATUS = MappingProxyType(
    {
        ErrorCode.INVALID_REQUEST: StatusCode.INVALID_ARGUMENT,
        ErrorCode.MODEL_NOT_FOUND: StatusCode.NOT_FOUND,
        ErrorCode.TOO_LARGE: StatusCode.INVALID_ARGUMENT,
        ErrorCode.MEDIA_UNSUPPORTED: StatusCode.INVALID_ARGUMENT,
        ErrorCode.MEDIA_CORRUPT: StatusCode.INVALID_ARGUMENT,
        ErrorCode.FETCH_FORBIDDEN: StatusCode.PERMISSION_DENIED,
        ErrorCode.FETCH_FAILED: StatusCode.FAILED_PRECONDITION,
        ErrorCode.NOT_FOUND: StatusCode.NOT_FOUND,
        ErrorCode.QUEUE_FULL: StatusCode.RESOURCE_EXHAUSTED,
        ErrorCode.OVERLOADED: StatusCode.RESOURCE_EXHAUSTED,
        ErrorCode.NOT_READY: StatusCode.UNAVAILABLE,
        ErrorCode.DRAINING: StatusCode.UNAVAILABLE,
        ErrorCode.DEADLINE_EXCEEDED: StatusCode.DEADLINE_EXCEEDED,
        ErrorCode.CANCELLED: StatusCode.CANCELLED,
        # Not UNAVAILABLE: what was pushed may have come, and must not be pushed again.
        ErrorCode.DELIVERY_FAILED: StatusCode.ABORTED,
        ErrorCode.WORKER_DIED: StatusCode.INTERNAL,
        ErrorCode.NON_FINITE: StatusCode.INTERNAL,
        ErrorCode.INTERNAL: StatusCode.INTERNAL,
    }
)
DOMAIN = "spmd_encoder"
DETAILS_KEY = "grpc-status-details-bin"
_RETRYABLE = frozenset({StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE})
_DEFAULT_RETRY_AFTER_S = 1.0
# Trailing metadata hold the message twice, once with three bytes for each that is not ASCII, and must stay under 8 KiB.
_MAX_MESSAGE_BYTES = 1024

# A refusal has a status of HTTP instead of a code.
_REFUSALS = MappingProxyType(
    {
        400: (StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        409: (StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
        413: (StatusCode.INVALID_ARGUMENT, "TOO_LARGE"),
        500: (StatusCode.INTERNAL, "INTERNAL"),
        502: (StatusCode.ABORTED, "DELIVERY_FAILED"),
        503: (StatusCode.UNAVAILABLE, "OVERLOADED"),
        504: (StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """`reason` is the error's code."""

    status: StatusCode
    reason: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: EncoderError) -> Failure:
        status = STATUS[error.code]
        retry_after_s = (error.retry_after_s or _DEFAULT_RETRY_AFTER_S) if status in _RETRYABLE else None
        return cls(
            status=status,
            reason=error.code.value,
            message=clipped(error.message),
            param=error.param,
            retry_after_s=retry_after_s,
        )

    @classmethod
    def of_refusal(cls, refusal: RefusalError) -> Failure:
        status, reason = _REFUSALS.get(refusal.status, _REFUSALS[500])
        retry_after_s = _DEFAULT_RETRY_AFTER_S if status in _RETRYABLE else None
        return cls(status=status, reason=reason, message=clipped(refusal.message), retry_after_s=retry_after_s)

    def details(self) -> bytes:
        """A google.rpc.Status with ErrorInfo, and RetryInfo where trying again can help."""
        status = Status(code=self.status.value[0], message=self.message)
        info = ErrorInfo(reason=self.reason, domain=DOMAIN)
        if self.param is not None:
            info.metadata["param"] = clipped(self.param)
        status.details.add().Pack(info)
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromMilliseconds(round(self.retry_after_s * 1000))
            status.details.add().Pack(RetryInfo(retry_delay=delay))
        return bytes(status.SerializeToString())


def clipped(text: str) -> str:
    """`text`, or its beginning, as valid UTF-8 that fits into metadata."""
    return text.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
