"""LLaVA-NeXT (1.6): the whole picture and tiles of it, joined row by row, without padding and with newlines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llava_next.configuration_llava_next import LlavaNextConfig
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import LlavaNextForConditionalGeneration

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.tiling import Tiling
from spmd_encoder.errors import StartupError
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.fixed_size import input_size_of
from spmd_encoder.models.llava import PROJECTION, class_rows
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import PROJECTOR, TINY_LLAMA, VISION, TilePreprocessor, VisionLanguageAdapter
from spmd_encoder.models.weights import from_folder


class AnyResPreprocessor(TilePreprocessor):
    """The whole picture as the first tile, then those of the best of the checkpoint's resolutions."""

    def __init__(self, processor: Any, config: Any, tiling: Tiling) -> None:
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        cost = CostTable(patch=vision.patch_size, fixed_tokens=side**2, tiling=tiling)
        super().__init__(processor, cost, (side, side), side**2 + class_rows(config))
        self._tiling = tiling

    def rows(self, tiles: int, image: Image.Image) -> int:
        """As `pack_image_features` joins them: the tiles' patches that are no padding, each row with a newline."""
        height, width = self.joined(image)
        return self._tile_rows + height * (width + 1)

    def joined(self, image: Image.Image) -> tuple[int, int]:
        """(height, width) in patches of the joined tiles without their padding."""
        rows, columns = self._tiling.grid(*image.size)
        return unpadded((rows * self._patches[0], columns * self._patches[1]), image.size)

    def extras(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"image_sizes": made["image_sizes"]}


class LlavaNextAdapter(VisionLanguageAdapter):
    """`tokens` `[rows, dim]`: the whole picture's patches, then those of its tiles with a newline behind each row.

    `grid` has the number of tiles first, then the patches of one of them, high and wide.
    """

    model_types = ("llava_next",)
    family = "llava_next"
    model_class: ClassVar[type[PreTrainedModel]] = LlavaNextForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = LlavaNextConfig
    kept: ClassVar[tuple[str, ...]] = (VISION, PROJECTOR, "model.image_newline")

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return tower_plan(VISION, config.vision_config, PROJECTION)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> AnyResPreprocessor:
        processor: Any = from_folder(LlavaNextImageProcessorPil, folder)
        config: Any = from_folder(LlavaNextConfig, folder)
        return AnyResPreprocessor(processor, config, any_resolution(processor, config, folder))

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        pinpoints = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]
        config = LlavaNextConfig(
            vision_config={**TINY_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
            text_config=TINY_LLAMA,
            image_token_index=60,
            image_grid_pinpoints=pinpoints,
        )
        processor = LlavaNextImageProcessorPil(
            size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112}, image_grid_pinpoints=pinpoints
        )
        write_random(cls.model_class, config, processor, out, seed)


def any_resolution(processor: Any, config: Any, folder: Path) -> Tiling:
    """The resolutions of `image_grid_pinpoints`, in tiles. Raises StartupError where processor and model differ."""
    side, _ = input_size_of(config.vision_config, processor, folder)
    pinpoints = [tuple(size) for size in processor.image_grid_pinpoints]
    if pinpoints != [tuple(size) for size in config.image_grid_pinpoints]:
        raise StartupError(f"{folder}: image_grid_pinpoints of preprocessor_config.json and of config.json differ")
    if any(pixels % side for size in pinpoints for pixels in size):
        raise StartupError(f"{folder}: image_grid_pinpoints are no multiples of {side} pixels, which a tile has")
    grids = tuple((height // side, width // side) for height, width in pinpoints)
    return Tiling(rule="resolution", side=side, grids=grids, always_whole=True)


def unpadded(patches: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of what `unpad_image` of transformers leaves of so many patches of a picture of `size` (width,
    height) in pixels. Of a very long one no row, or no column, may be left."""
    (height, width), (real_width, real_height) = patches, size
    if real_width / real_height > width / height:
        height -= 2 * ((height - int(round(real_height * (width / real_width), 7))) // 2)
    else:
        width -= 2 * ((width - int(round(real_width * (height / real_height), 7))) // 2)
    return height, width


def film_rows(model: Any, frames: Tensor, counts: Sequence[int], *, closing: int = 0) -> list[Tensor]:
    """Each film's rows, of so many `frames` each: as if all were one film, whose last `closing` rows close each."""
    rows = model.get_video_features(frames[None]).pooler_output.flatten(0, -2)
    of_frames, ends = rows[: len(rows) - closing], rows[len(rows) - closing :]
    each = len(of_frames) // sum(counts)
    return [torch.cat([own, ends]) for own in torch.split(of_frames, [each * count for count in counts])]
