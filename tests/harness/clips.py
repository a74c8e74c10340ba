"""Decoded films and sounds for tests of model families: no codec is involved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import skimage.data
from PIL import Image

from spmd_encoder.media.base import Film, FilmInfo, Sound


def film(num_frames: int, width: int, height: int, fps: float = 25.0) -> Film:
    """A photo that turns."""
    photos: Any = skimage.data
    photo = Image.fromarray(photos.astronaut()).resize((width, height))
    frames = tuple(np.asarray(photo.rotate(7 * n)) for n in range(num_frames))
    info = FilmInfo(num_frames=num_frames, fps=fps, seconds=num_frames / fps, width=width, height=height)
    times = tuple(n / fps for n in range(num_frames))
    return Film(frames=frames, times=times, indices=tuple(range(num_frames)), info=info)


def only(whole: Film, indices: Sequence[int]) -> Film:
    """The film with these frames chosen."""
    return dataclasses.replace(
        whole,
        frames=tuple(whole.frames[index] for index in indices),
        times=tuple(whole.times[index] for index in indices),
        indices=tuple(indices),
    )


def sound(seconds: float, rate: int) -> Sound:
    """A chord with some noise."""
    count = max(1, round(seconds * rate))
    at = np.arange(count) / rate
    tones = sum(np.sin(2 * np.pi * pitch * at) / 4 for pitch in (220.0, 277.2, 3000.0))
    noise = np.random.default_rng(count).normal(0, 0.05, count)
    return Sound(samples=(tones + noise).astype(np.float32), rate=rate)
