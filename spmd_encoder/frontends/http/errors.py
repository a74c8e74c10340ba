"""How failures look over HTTP: one status per `ErrorCode`, OpenAI's error shape, a stable code."""

from __future__ import annotations

import math
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from spmd_encoder.errors import EncoderError, ErrorCode

STATUS = MappingProxyType(
    {
        ErrorCode.INVALID_REQUEST: 400,
        ErrorCode.MODEL_NOT_FOUND: 404,
        ErrorCode.TOO_LARGE: 413,
        ErrorCode.MEDIA_UNSUPPORTED: 415,
        ErrorCode.MEDIA_CORRUPT: 422,
        ErrorCode.FETCH_FORBIDDEN: 403,
        ErrorCode.FETCH_FAILED: 422,
        ErrorCode.NOT_FOUND: 404,
        ErrorCode.QUEUE_FULL: 429,
        ErrorCode.OVERLOADED: 503,
        ErrorCode.NOT_READY: 503,
        ErrorCode.DRAINING: 503,
        ErrorCode.DEADLINE_EXCEEDED: 504,
        ErrorCode.CANCELLED: 499,
        ErrorCode.DELIVERY_FAILED: 502,
        ErrorCode.WORKER_DIED: 500,
        ErrorCode.NON_FINITE: 500,
        ErrorCode.INTERNAL: 500,
    }
)
_RETRYABLE = frozenset({429, 503})
_DEFAULT_RETRY_AFTER_S = 1.0


class HttpError(Exception):
    """A failure that only this protocol knows: an unknown route, a sender that is too slow."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.close = close


class ErrorBody(msgspec.Struct, frozen=True):
    """The object under `error`, in a reply and in an item."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


def error_body(error: EncoderError) -> ErrorBody:
    return ErrorBody(error.message, _error_type(STATUS[error.code]), error.param, error.code.value)


def retry_headers(error: EncoderError) -> dict[str, str]:
    """`Retry-After` in whole seconds where trying again later can help."""
    if STATUS[error.code] not in _RETRYABLE:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or _DEFAULT_RETRY_AFTER_S)))}


def error_response(error: EncoderError) -> Response:
    return json_response(STATUS[error.code], ErrorReply(error_body(error)), retry_headers(error))


def plain_error(
    status: int, code: str, message: str, headers: dict[str, str] | None = None, *, param: str | None = None
) -> Response:
    """An error that has no `ErrorCode`."""
    return json_response(status, ErrorReply(ErrorBody(message, _error_type(status), param, code)), headers)


def http_error_response(error: HttpError) -> Response:
    headers = {"connection": "close"} if error.close else None
    return plain_error(error.status, error.code, error.message, headers, param=error.param)


def model_not_found(error: EncoderError) -> HttpError:
    """MODEL_NOT_FOUND with the code that OpenAI's clients know."""
    return HttpError(404, "model_not_found", error.message, param=error.param)


def json_response(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _error_type(status: int) -> str:
    match status:
        case 429:
            return "rate_limit_error"
        case 404:
            return "not_found_error"
        case _ if status < 500:
            return "invalid_request_error"
        case 503:
            return "service_unavailable_error"
        case 504:
            return "timeout_error"
        case _:
            return "server_error"
