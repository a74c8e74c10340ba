"""Idefics3 and SmolVLM: the picture scaled to its longer side, in tiles, and the whole one last."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.idefics3.configuration_idefics3 import Idefics3Config
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.modeling_idefics3 import Idefics3ForConditionalGeneration
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMForConditionalGeneration

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.tiling import Tiling
from spmd_encoder.api.types import Detail, Modality
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.frame_films import SmolFilms
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import TINY_LLAMA, TilePreprocessor, VisionLanguageAdapter
from spmd_encoder.models.weights import from_folder


class IdeficsPreprocessor(TilePreprocessor):
    """Tiles row by row, then the whole picture; small pictures are scaled up, so that all have several tiles."""

    def __init__(self, processor: Any, config: Any) -> None:
        patch, pixels = config.vision_config.patch_size, processor.max_image_size["longest_edge"]
        side = pixels // patch
        # Without splitting there is one tile, whose size is the same.
        edge = processor.size["longest_edge"] if processor.do_image_splitting else pixels
        self._tiling = Tiling(rule="edge", side=pixels, edge=edge)
        cost = CostTable(patch=patch, fixed_tokens=side**2, tiling=self._tiling)
        super().__init__(processor, cost, (side, side), (side // config.scale_factor) ** 2)

    def details(self, image: Image.Image) -> dict[str, Detail]:
        rows, columns = self._tiling.grid(*image.size)
        return {"rows": rows, "cols": columns} if rows * columns > 1 else {"rows": 0, "cols": 0}


class Idefics3Adapter(VisionLanguageAdapter):
    """`tokens` `[rows, dim]`: those of the tiles, row by row, and last those of the whole picture.

    `grid` has the number of tiles first, then the patches of one of them, high and wide. `details` say how many `rows`
    and `cols` of tiles there are, both 0 for a picture in one piece, as transformers' processor does: the prompt names
    the place of each tile. The projector is a single layer: every rank has all of it.
    """

    model_types: ClassVar[tuple[str, ...]] = ("idefics3",)
    family = "idefics3"
    model_class: ClassVar[type[PreTrainedModel]] = Idefics3ForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Idefics3Config
    processor_class: ClassVar[type[Any]] = Idefics3ImageProcessorPil
    kept = ("model.vision_model", "model.connector")

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return tower_plan(cls.kept[0], config.vision_config)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> IdeficsPreprocessor:
        return IdeficsPreprocessor(from_folder(cls.processor_class, folder), from_folder(cls.config_class, folder))

    def rows(self, inputs: dict[str, Tensor], tiles: list[int]) -> list[Tensor]:
        # As if all tiles were those of one prompt, which needs no padding.
        model: Any = self._model
        (rows,) = model.get_image_features(inputs["pixel_values"][None]).pooler_output
        each = len(rows) // sum(tiles)
        return list(torch.split(rows, [each * count for count in tiles]))

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        make: Any = cls.config_class
        config = make(
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14},
            text_config=TINY_LLAMA,
            image_token_id=60,
            scale_factor=2,
        )
        processor = cls.processor_class(size={"longest_edge": 336}, max_image_size={"longest_edge": 112})
        write_random(cls.model_class, config, processor, out, seed)


class SmolVLMAdapter(Idefics3Adapter):
    """As Idefics3's, whose code it has. A frame of a film is a picture in one piece."""

    model_types = ("smolvlm",)
    family = "smolvlm"
    modalities = (Modality.IMAGE, Modality.VIDEO)
    model_class = SmolVLMForConditionalGeneration
    config_class = SmolVLMConfig
    processor_class = SmolVLMImageProcessorPil

    @classmethod
    def load_preprocessor(cls, folder: Path) -> IdeficsPreprocessor:
        preprocessor = super().load_preprocessor(folder)
        config: Any = from_folder(cls.config_class, folder)
        patch, side = config.vision_config.patch_size, config.vision_config.image_size
        films = SmolFilms.load(folder, side, patch, (side // patch // config.scale_factor) ** 2)
        return preprocessor.with_films(films)
