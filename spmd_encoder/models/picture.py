"""What all families do alike with one picture."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from spmd_encoder.errors import EncoderError, ErrorCode

MAX_ASPECT_RATIO = 200
"""Qwen's processor refuses more (`smart_resize`); elsewhere it bounds the size of the resized strip."""


def run_processor(processor: Any, image: Image.Image, **options: Any) -> dict[str, Tensor]:
    """The processor's tensors for one RGB picture, called with `options`.

    Raises EncoderError MEDIA_CORRUPT for a picture that is far longer than wide (or the reverse), or that the
    processor itself refuses.
    """
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT,
            f"a picture of {width} x {height} pixels cannot be encoded: "
            f"this model takes a longer side of at most {MAX_ASPECT_RATIO} times the shorter one",
        )
    try:
        # A PIL image and not an array: of an array with 3 rows the processor would guess the channel axis wrong.
        made = processor(images=[image], return_tensors="pt", **options)
    except ValueError as error:
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT,
            f"a picture of {width} x {height} pixels cannot be encoded by this model's image processor ({error})",
        ) from error
    return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}
