"""An item's price in encoder tokens, from its width and height alone."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """How a family turns a picture's size into encoder tokens; data, so that it can travel in `Hello`.

    `fixed_tokens` is set for towers with one input size. Otherwise a picture is resized to a multiple of
    `patch * merge` per side with `min_pixels <= area <= max_pixels`, as the Qwen processors do
    (`smart_resize` in transformers' `image_processing_qwen2_vl`), and costs `area / patch**2` patches.
    """

    patch: int = 14
    merge: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    fixed_tokens: int | None = None

    def image_tokens(self, width: int, height: int) -> int:
        """Patches that the tower computes for one picture (before any merging); at least 1."""
        if self.fixed_tokens is not None:
            return self.fixed_tokens
        unit = self.patch * self.merge
        area = max(1, width) * max(1, height)
        area = min(max(area, self.min_pixels), self.max_pixels) if self.max_pixels else max(area, self.min_pixels)
        return max(self.merge**2, math.ceil(area / unit**2) * self.merge**2)
