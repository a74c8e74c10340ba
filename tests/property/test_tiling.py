"""The pure rules for tiles are those of transformers' image processors, and so is what is left of padded ones."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.image_processing_utils import select_best_resolution
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

from spmd_encoder.api.tiling import Tiling, grids_within
from spmd_encoder.models.llava_next import unpadded
from tests.harness.examples import examples

SIDES = st.integers(1, 6000)
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
EVERY = examples(300)


@EVERY
@given(SIDES, SIDES, st.sampled_from([GRIDS, grids_within(1, 36)]))
def test_the_best_resolution(width: int, height: int, grids: tuple[tuple[int, int], ...]) -> None:
    tiling = Tiling(rule="resolution", side=336, grids=grids, always_whole=True)
    resolutions = [(rows * 336, columns * 336) for rows, columns in grids]
    best = select_best_resolution((height, width), resolutions)
    # Where no pixel of the picture would survive, transformers has none.
    if best is not None:
        assert tiling.grid(width, height) == (best[0] // 336, best[1] // 336)


@EVERY
@given(SIDES, SIDES, st.sampled_from([(1, 12), (1, 6), (2, 40)]))
def test_the_nearest_aspect(width: int, height: int, within: tuple[int, int]) -> None:
    tiling = Tiling(rule="aspect", side=448, grids=grids_within(*within))
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), *within)
    assert tiling.grid(width, height) == (rows, columns)


@EVERY
@given(SIDES, SIDES, st.sampled_from([(2048, 512), (1456, 364), (512, 512), (1500, 512)]))
def test_the_longer_edge(width: int, height: int, sides: tuple[int, int]) -> None:
    edge, side = sides
    processor = Idefics3ImageProcessorPil(size={"longest_edge": edge}, max_image_size={"longest_edge": side})
    tiles, *grid = processor.get_number_of_image_patches(height, width)
    tiling = Tiling(rule="edge", side=side, edge=edge)
    assert tiling.grid(width, height) == (tuple(grid) if tiles else (1, 1))
    assert tiling.tiles(width, height) == max(1, tiles)


@EVERY
@given(SIDES, SIDES, st.sampled_from([1, 2, 9]))
def test_slices(width: int, height: int, most: int) -> None:
    grid = MiniCPMV4_6ImageProcessorPil().get_sliced_grid((height, width), most, 448)
    tiling = Tiling(rule="slices", side=448, most=most)
    assert tiling.grid(width, height) == (tuple(grid) if grid else (1, 1))
    assert tiling.tiles(width, height) == (1 + grid[0] * grid[1] if grid else 1)


@EVERY
@given(SIDES, SIDES, st.sampled_from(GRIDS), st.sampled_from([8, 24, 27]))
def test_what_is_left_without_padding(width: int, height: int, grid: tuple[int, int], side: int) -> None:
    patches = grid[0] * side, grid[1] * side
    left = unpad_image(torch.zeros(1, *patches), (height, width))
    assert unpadded(patches, (width, height)) == left.shape[1:]
