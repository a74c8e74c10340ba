"""What all families do alike with one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.models.weights import from_folder

MAX_ASPECT_RATIO = 200
"""Qwen's processor refuses more (`smart_resize`); elsewhere it bounds the size of the resized strip."""


def image_processor(folder: Path) -> Any:
    """The processor of the class that the checkpoint names. Raises StartupError where none can be used."""
    return from_folder(AutoImageProcessor, folder, backend="pil")


def run_processor(processor: Any, image: Image.Image, **options: Any) -> dict[str, Tensor]:
    """The processor's tensors for one RGB picture, called with `options`.

    Raises EncoderError MEDIA_CORRUPT for a picture that is far longer than wide (or the reverse), or that the
    processor itself refuses.
    """
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise refused(image.size, f"this model takes a longer side of at most {MAX_ASPECT_RATIO} times the shorter one")
    try:
        # A PIL image and not an array: of an array with 3 rows the processor would guess the channel axis wrong.
        made = processor(images=[image], return_tensors="pt", **options)
    except ValueError as error:
        raise refused(image.size, f"this model's image processor says: {error}") from error
    return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}


def refused(size: tuple[int, int], why: str) -> EncoderError:
    """The error for a picture of `size` (width, height) that can be read but not encoded."""
    return EncoderError(ErrorCode.MEDIA_CORRUPT, f"a picture of {size[0]} x {size[1]} pixels cannot be encoded: {why}")
