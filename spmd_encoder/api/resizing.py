"""To which size a picture is brought, from its width and height alone, as transformers' image processors do it."""

from __future__ import annotations

import math


def whole_squares(
    width: int, height: int, side: int, least: float, most: float, *, raises_short_sides: bool = False
) -> int:
    """Of how many squares of `side` pixels a picture is made when both its sides are multiples of that.

    Its pixels come within `least` and `most` (0: no bound), as far as whole squares allow. With `raises_short_sides`
    one whose side is shorter than a square is scaled up to it before all else. This is `smart_resize` of transformers'
    `image_processing_pil_qwen2_vl.py`, and with `raises_short_sides` that of `image_processing_pil_glm4v.py`.
    """
    if raises_short_sides and min(width, height) < side:
        scale = max(side / width, side / height)
        width, height = int(width * scale), int(height * scale)
    columns, rows = round(width / side), round(height / side)
    pixels = columns * rows * side**2
    if most and pixels > most:
        scale = math.sqrt(width * height / most) * side
        columns, rows = max(1, math.floor(width / scale)), max(1, math.floor(height / scale))
    elif pixels < least:
        scale = math.sqrt(least / (width * height)) / side
        columns, rows = math.ceil(width * scale), math.ceil(height * scale)
    return max(1, columns) * max(1, rows)
