"""The pure rule for resized pictures is that of transformers' image processors."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen_resize

from spmd_encoder.api.resizing import whole_squares
from spmd_encoder.api.tiling import Tiling
from tests.harness.examples import examples

SIDES = st.integers(1, 6000)
EVERY = examples(300)


BOUNDS = st.sampled_from([(3136, 12_845_056), (65_536, 16_777_216), (0, 50_000)])


@EVERY
@given(SIDES, SIDES, st.sampled_from([28, 32]), BOUNDS)
def test_pictures(width: int, height: int, side: int, bounds: tuple[int, int]) -> None:
    assume(max(width, height) <= 199 * min(width, height))
    least, most = bounds
    high, wide = qwen_resize(height, width, factor=side, min_pixels=least, max_pixels=most)
    assert whole_squares(width, height, side, *bounds) == max(1, high // side) * max(1, wide // side)


@EVERY
@given(SIDES, SIDES, st.sampled_from([28, 32]), BOUNDS, st.integers(2, 700))
def test_films(width: int, height: int, side: int, bounds: tuple[int, int], frames: int) -> None:
    assume(max(width, height) <= 199 * min(width, height))
    least, most = bounds
    high, wide = glm_resize(frames, height, width, 2, side, least, most)
    got = whole_squares(width, height, side, *bounds, frames=frames, step=2, raises_short_sides=True)
    assert got == max(1, high // side) * max(1, wide // side)


@EVERY
@given(SIDES, SIDES, st.sampled_from([1, 2, 9]), st.sampled_from(["4x", "16x"]))
def test_squares_of_slices(width: int, height: int, most: int, downsample_mode: str) -> None:
    assume(max(width, height) <= 199 * min(width, height))
    processor: Any = MiniCPMV4_6ImageProcessorPil()
    size, unit = (height, width), 28 if downsample_mode == "4x" else 56
    grid = processor.get_sliced_grid(size, most, 448)
    shapes = [processor.find_best_resize(size, 448, 14, downsample_mode, allow_upscale=grid is None)]
    if grid is not None:
        shapes.append(processor.get_refine_size(size, grid, 448, 14, downsample_mode, allow_upscale=True))
    tiling = Tiling(rule="slices", side=448, most=most, unit=unit)
    assert tiling.squares(width, height) == sum(high * wide for high, wide in shapes) // unit**2
