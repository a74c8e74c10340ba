"""Sizes and lengths that nobody thinks of, and what must hold of each: rows as promised, or a refusal with a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from PIL import Image

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, FilmInfo, Sound
from spmd_encoder.models.base import FamilyAdapter, Features
from spmd_encoder.models.families import FamilyEntry
from tests.harness.families import SAME_TOWER
from tests.harness.samples import forwards

Size = tuple[int, int]
"""(width, height) in pixels."""

REFUSALS = (ErrorCode.MEDIA_CORRUPT, ErrorCode.MEDIA_UNSUPPORTED, ErrorCode.TOO_LARGE)
"""All of them are the item's fault, and no fault of the server: a status of 4xx."""
SMALL: tuple[Size, ...] = tuple((width, height) for width in range(1, 65) for height in range(1, 65))
_EDGES = (1, 2, 3, 13, 14, 15, 16, 27, 28, 29, 31, 32, 33, 63, 64)
SOME_SMALL = tuple((w, h) for i, w in enumerate(_EDGES) for j, h in enumerate(_EDGES) if (3 * i + j) % 6 == 0)
"""Sides about the patches, and the merged ones, of most families."""
LONG: tuple[Size, ...] = (
    *((1, 199), (1, 200), (200, 1), (1, 201), (2, 400), (401, 2), (1, 2000), (2000, 1), (9, 2000), (2000, 10)),
    *((1, 10_000), (10_000, 1), (3, 4096), (4096, 3), (20, 4000), (4000, 21), (1999, 65)),
)
"""Up to the longest shape that is taken, and beyond it."""


def marked(families: Iterable[FamilyEntry]) -> list[ParameterSet]:
    """As parameters of a test, of which those whose tower has been seen already are for the whole sweep alone."""
    return [
        pytest.param(entry, id=entry.family, marks=[pytest.mark.sweep] if entry.family in SAME_TOWER else [])
        for entry in families
    ]


def large(count: int, seed: int, most: int = 2000) -> list[Size]:
    """Sizes with sides up to `most`, the same for the same seed."""
    chance = random.Random(seed)
    return [(chance.randint(1, most), chance.randint(1, most)) for _ in range(count)]


def picture(width: int, height: int) -> Image.Image:
    """Of many values, and cheap to make in any size."""
    return Image.fromarray(_pixels(width, height))


def film(num_frames: int, width: int, height: int, fps: float = 25.0) -> Film:
    """All its frames are chosen."""
    frames = tuple(_pixels(width, height, 11 * index) for index in range(num_frames))
    info = FilmInfo(num_frames=num_frames, fps=fps, seconds=num_frames / fps, width=width, height=height)
    times = tuple(index / fps for index in range(num_frames))
    return Film(frames=frames, times=times, indices=tuple(range(num_frames)), info=info)


def sound(num_samples: int, rate: int) -> Sound:
    """A tone that rises."""
    at = np.arange(num_samples) / rate
    return Sound(samples=(np.sin(2 * np.pi * (200 + 10 * at) * at) / 3).astype(np.float32), rate=rate)


def features_or_refusal(make: Callable[[], Features], named: str) -> Features | None:
    """None where the item was refused with a code of the item's own and a reason, which has `named` in it.

    Whatever else it raises escapes.
    """
    try:
        return make()
    except EncoderError as error:
        assert error.code in REFUSALS, error
        assert named in error.message, error.message
        assert len(error.message.split()) >= 8, f"no reason: {error.message}"
        return None


def check_rows(adapter: FamilyAdapter, items: Iterable[Features], at_once: int = 16) -> None:
    """As many finite rows for each item as its features promise, in batches of `at_once` where the family has them."""
    waiting = iter(items)
    while some := list(islice(waiting, at_once)):
        for item, out in zip(some, forwards(adapter, some), strict=True):
            assert out.tokens.shape[0] == item.num_tokens > 0, (item.grid, out.tokens.shape, item.num_tokens)
            assert bool(torch.isfinite(out.tokens).all()), item.grid
            assert out.pooled is None or bool(torch.isfinite(out.pooled).all()), item.grid


def of_each_shape(features: Iterable[Features]) -> Iterator[Features]:
    """The first of all that look the same to the tower."""
    seen = set()
    for item in features:
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(item.tensors.items()))
        key = (item.grid, item.num_tokens, item.cost, shapes)
        if key not in seen:
            seen.add(key)
            yield item


def _pixels(width: int, height: int, shift: int = 0) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """`[height, width, 3]`."""
    across = np.arange(width, dtype=np.uint32)[None, :, None] * 37
    down = np.arange(height, dtype=np.uint32)[:, None, None] * 53
    return ((across + down + np.array([0, 80, 160], np.uint32) + shift) % 251).astype(np.uint8)
