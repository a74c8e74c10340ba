"""The bytes that one request holds, whatever its protocol, reserved at the service as they come."""

from __future__ import annotations

from contextlib import ExitStack

from spmd_encoder.api.service import EncoderService
from spmd_encoder.errors import EncoderError, ErrorCode

# Media are accounted for in steps of this size as they come.
_RESERVE_STEP_BYTES = 256 * 1024


class Account:
    """The bytes that one request holds, its body's and those fetched for it; reserved until `held` closes.

    `max_bytes` is the most that the service lets all requests hold together.
    """

    def __init__(self, service: EncoderService, held: ExitStack, *, max_bytes: int) -> None:
        self._service = service
        self._held = held
        self._max_bytes = max_bytes
        self._expected = 0
        self._used = 0
        self._reserved = 0

    def expect(self, num_bytes: int) -> None:
        """How much will come, where that is known. Nothing is reserved for it: a few idle senders of large promises
        must not shut out the others. It only keeps the last step from being larger than what is left."""
        self._expected = num_bytes

    def add(self, num_bytes: int) -> None:
        """So many bytes more have come. Raises `EncoderError`: OVERLOADED, or TOO_LARGE where trying again cannot
        help."""
        self._used += num_bytes
        if self._used > self._max_bytes:
            raise EncoderError(
                ErrorCode.TOO_LARGE,
                f"the request has more bytes than the server ever holds (--max-inflight-bytes {self._max_bytes})",
            )
        while self._used > self._reserved:
            left = self._expected - self._reserved
            step = min(_RESERVE_STEP_BYTES, left) if left > 0 else _RESERVE_STEP_BYTES
            step = min(step, self._max_bytes - self._reserved)
            self._held.enter_context(self._service.reserve(step))
            self._reserved += step

    def hand_over(self) -> ExitStack:
        """Who holds the bytes from now on, those that came and those to come, apart from the request."""
        self._held = self._held.pop_all()
        return self._held
