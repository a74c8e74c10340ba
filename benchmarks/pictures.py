"""Pictures for load: the same bytes for the same seed, about as hard to decode as photographs."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import numpy as np
from PIL import Image


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """`448x448,640x480` as (width, height) pairs. Raises ValueError."""
    found = [re.fullmatch(r"(\d+)x(\d+)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ValueError(f"sizes look like 448x448,640x480, not {text!r}")
    return [(int(match[1]), int(match[2])) for match in found if match]


def make_pictures(sizes: Sequence[tuple[int, int]], count: int, seed: int = 0) -> list[bytes]:
    """`count` JPEG files, all different, their sizes in turn.

    Smooth shapes with fine noise: plain noise would be far more bytes than a photograph, a plain colour far fewer.
    """
    rng = np.random.default_rng(seed)
    files = []
    for index in range(count):
        width, height = sizes[index % len(sizes)]
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        noisy = smooth + rng.integers(-8, 9, smooth.shape, dtype=np.int16)
        out = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    return files
