"""Into how many tiles a picture is cut, from its width and height alone, as transformers' image processors do it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Grid = tuple[int, int]
"""Tiles of one picture: (rows, columns)."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A family's rule with its numbers; data, so that it can travel in `Hello`. Tiles are squares of `side` pixels.

    `resolution` (LLaVA-NeXT): of `grids`, the one that keeps most of the picture's pixels, then the smallest.
    `aspect` (InternVL): of `grids`, the one whose shape is nearest; the later of equals, if not far too large.
    `slices` (MiniCPM-V): as many as have the picture's area, at most `most`, or one less or more; the nearest shape.
    They keep their own shape, in whole squares of `unit` pixels, with the area of a tile.
    `edge` (Idefics3): the longer side is scaled to `edge` pixels, the shorter one with it; whole tiles.
    Where a picture is cut at all, the whole one, scaled down, is a tile too; with `always_whole` in any case.
    """

    rule: Literal["resolution", "aspect", "slices", "edge"]
    side: int
    grids: tuple[Grid, ...] = ()
    most: int = 1
    edge: int = 0
    unit: int = 0
    always_whole: bool = False

    def tiles(self, width: int, height: int) -> int:
        """All that the tower computes for one picture, at least 1."""
        rows, columns = self.grid(width, height)
        count = rows * columns
        return count + (count > 1 or self.always_whole)

    def squares(self, width: int, height: int) -> int:
        """Of how many squares of `unit` pixels the `slices` of a picture are made, with the whole one."""
        rows, columns = self.grid(width, height)
        if rows * columns == 1:
            return self._shaped(width, height)
        wide, high = (max(1, round(side / count)) for side, count in ((width, columns), (height, rows)))
        return self._shaped(width, height) + rows * columns * self._shaped(wide, high)

    def _shaped(self, width: int, height: int) -> int:
        """`find_best_resize` of `image_processing_pil_minicpmv4_6`."""
        high = int(self.side / math.sqrt(width / height))
        wide = int(high * (width / height))
        return max(1, round(wide / self.unit)) * max(1, round(high / self.unit))

    def grid(self, width: int, height: int) -> Grid:
        """How the picture is cut."""
        match self.rule:
            case "resolution":
                return max(self.grids, key=lambda grid: self._kept(grid, width, height))
            case "aspect":
                return self._nearest(width, height)
            case "slices":
                return self._sliced(width, height)
            case "edge":
                return self._edged(width, height)

    def _kept(self, grid: Grid, width: int, height: int) -> tuple[int, int]:
        """(pixels of the picture that survive, less the tiles): `select_best_resolution`."""
        tall, wide = (count * self.side for count in grid)
        scale = min(wide / width, tall / height)
        return min(int(width * scale) * int(height * scale), width * height), -tall * wide

    def _nearest(self, width: int, height: int) -> Grid:
        """`get_optimal_tiled_canvas` of `image_processing_pil_got_ocr2`."""
        aspect, best, least = width / height, (1, 1), math.inf
        for rows, columns in self.grids:
            off = abs(aspect - columns / rows)
            large_enough = width * height > 0.5 * self.side**2 * rows * columns
            if off < least or (off == least and large_enough):
                best, least = (rows, columns), off
        return best

    def _sliced(self, width: int, height: int) -> Grid:
        """`get_sliced_grid` of `image_processing_pil_minicpmv4_6`."""
        wanted = min(math.ceil(width * height / self.side**2), self.most)
        if wanted <= 1:
            return (1, 1)
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= self.most]
        grids = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
        aspect = math.log(width / height)
        return min(grids, key=lambda grid: (abs(aspect - math.log(grid[1] / grid[0])), -grid[0]))

    def _edged(self, width: int, height: int) -> Grid:
        """`get_resize_output_image_size` and `resize_for_vision_encoder` of `image_processing_pil_idefics3`."""
        shorter = int(self.edge / (max(width, height) / min(width, height)))
        long = math.ceil(self.edge / self.side)
        short = max(1, math.ceil(shorter / self.side))
        return (short, long) if width >= height else (long, short)


def grids_within(least: int, most: int) -> tuple[Grid, ...]:
    """All grids of `least` to `most` tiles, by their number (`get_all_supported_aspect_ratios`)."""
    sides = range(1, most + 1)
    # Stable, and columns first: where shapes are equally near, the order decides.
    grids = [(rows, columns) for columns in sides for rows in sides if least <= rows * columns <= most]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))
