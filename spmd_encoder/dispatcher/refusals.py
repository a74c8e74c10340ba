"""What the ledger says of items that it does not take, or gives up."""

from __future__ import annotations

from spmd_encoder.errors import EncoderError, ErrorCode


def check_room(wanted: int, in_hand: int, limit: int, what: str, flag: str) -> None:
    """Raises `EncoderError` TOO_LARGE or QUEUE_FULL where `wanted` more do not fit."""
    if wanted > limit:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the request has {wanted} {what}, more than the server ever takes at once ({flag} {limit}); send fewer "
            "or smaller items in a request",
        )
    if in_hand + wanted > limit:
        raise EncoderError(
            ErrorCode.QUEUE_FULL,
            f"{in_hand} {what} are in hand and {wanted} more would pass the limit of {limit} ({flag}); try again later",
        )


def not_held() -> EncoderError:
    return EncoderError(
        ErrorCode.NOT_FOUND, "no cache holds the result of an item with this digest; send the item itself"
    )


def gave_up(quarantine_s: float) -> EncoderError:
    return EncoderError(
        ErrorCode.WORKER_DIED,
        "two workers died while this item was being encoded; it is not tried again, and equal items are refused "
        f"for {quarantine_s:.0f} s",
    )
