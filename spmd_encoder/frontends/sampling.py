"""How a request may say that a film is to be sampled, whatever its protocol."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from spmd_encoder.api.types import ItemOptions
from spmd_encoder.errors import EncoderError, ErrorCode

MIN_FPS, MAX_FPS = 0.001, 1000
DEFAULT_FPS = 2.0
"""Of a list of frames whose rate is not said."""
MAX_FRAMES = 2**16
Fps = Annotated[float, msgspec.Meta(ge=MIN_FPS, le=MAX_FPS)]
MaxFrames = Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAMES)]


class _Sampling(msgspec.Struct, frozen=True):
    fps: Fps | None = None
    max_frames: MaxFrames | None = None


def sampling_of(fps: object, max_frames: object) -> ItemOptions:
    """Raises `EncoderError` INVALID_REQUEST for numbers out of range, or what is no number."""
    try:
        given = msgspec.convert({"fps": fps, "max_frames": max_frames}, _Sampling)
        if given.fps is not None and math.isnan(given.fps):
            raise ValueError
    except ValueError:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST,
            f"`fps` is a number from {MIN_FPS:g} to {MAX_FPS:g}, `max_frames` an integer from 1 to {MAX_FRAMES}",
        ) from None
    return ItemOptions(fps=given.fps, max_frames=given.max_frames)
