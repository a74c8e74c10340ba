"""To which size a picture is brought, from its width and height alone, as transformers' image processors do it."""

from __future__ import annotations

import math


def whole_squares(
    width: int,
    height: int,
    side: int,
    least: int,
    most: int,
    *,
    frames: int = 1,
    step: int = 1,
    raises_short_sides: bool = False,
) -> int:
    """Of how many squares of `side` pixels a picture is made when both its sides are multiples of that.

    The pixels of all `frames` (of which a multiple of `step` counts) come within `least` and `most` (0: no bound), as
    far as whole squares allow. With `raises_short_sides` a picture with a side shorter than a square is scaled up to it
    before all else. This is `smart_resize` of transformers' `image_processing_pil_qwen2_vl.py`, and with frames and
    `raises_short_sides` that of `image_processing_pil_glm4v.py` and `video_processing_qwen3_vl.py`: the sums are in
    their order, as the last bit may decide on a row.
    """
    if raises_short_sides and min(width, height) < side:
        scale = max(side / width, side / height)
        width, height = int(width * scale), int(height * scale)
    columns, rows = round(width / side), round(height / side)
    pixels = round(frames / step) * step * columns * rows * side**2
    if most and pixels > most:
        beta = math.sqrt(frames * height * width / most)
        columns, rows = math.floor(width / beta / side), math.floor(height / beta / side)
    elif pixels < least:
        beta = math.sqrt(least / (frames * height * width))
        columns, rows = math.ceil(width * beta / side), math.ceil(height * beta / side)
    return max(1, columns) * max(1, rows)
