"""What most vision-language families share: transformers' whole class, of which tower and projector are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Detail, ItemOptions, Modality
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import Features, Preprocessor, TowerOutput
from spmd_encoder.models.film_settings import FilmMaker
from spmd_encoder.models.fixed_size import input_size_of
from spmd_encoder.models.language_stand_in import LanguageStandInAdapter
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.pixtral import use_packed_attention

VISION = "model.vision_tower"
PROJECTOR = "model.multi_modal_projector"
"""Where most whole models keep the two."""


class TilePreprocessor(Preprocessor):
    """One picture as `pixel_values` `[tiles, 3, height, width]`, each tile of `patches` (rows, columns)."""

    def __init__(
        self, processor: Any, cost: CostTable, patches: tuple[int, int], tile_rows: int, **options: Any
    ) -> None:
        self.processor = processor
        self._cost = cost
        self._patches = patches
        self._tile_rows = tile_rows
        self._options = options
        self._films: FilmMaker | None = None

    def with_films(self, films: FilmMaker) -> Self:
        """The same, which takes films as well: their frames have one tile each."""
        self._films = films
        return self

    def cost_table(self) -> CostTable:
        return self._cost if self._films is None else replace(self._cost, video=self._films.cost())

    def not_served(self) -> Mapping[Modality, str]:
        refusal = self._films.refusal if self._films is not None else None
        return {} if refusal is None else {Modality.VIDEO: refusal}

    def choose_frames(self, info: FilmInfo, options: ItemOptions) -> Sequence[int]:
        return super().choose_frames(info, options) if self._films is None else self._films.choose(info, options)

    def preprocess_video(self, film: Film) -> Features:
        return super().preprocess_video(film) if self._films is None else self._films.features(film)

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self.processor, image, **self._options)
        pixels = made["pixel_values"].flatten(0, -4)
        tiles, (h, w) = len(pixels), self._patches
        return Features(
            tensors={"pixel_values": pixels, **self.extras(made)},
            num_tokens=self.rows(tiles, image),
            cost=tiles * h * w,
            grid=(tiles, h, w),
            details=self.details(image),
        )

    def rows(self, tiles: int, image: Image.Image) -> int:
        """Rows that the model gives for a picture in so many tiles."""
        return tiles * self._tile_rows

    def details(self, image: Image.Image) -> dict[str, Detail]:
        """What the language model's prompt needs to know of the tiles, beside their number."""
        return {}

    def extras(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What else of the processor's tensors `get_image_features` takes, `[1, ...]` each."""
        return {}


def single_tile(processor: Any, vision: Any, rows: int, folder: Path) -> TilePreprocessor:
    """For a model that gives `rows` for each picture of its tower's `image_size`.

    Raises StartupError where the processor makes others.
    """
    side = input_size_of(vision, processor, folder)[0] // vision.patch_size
    cost = CostTable(patch=vision.patch_size, fixed_tokens=side**2)
    return TilePreprocessor(processor, cost, (side, side), rows)


class VisionLanguageAdapter(LanguageStandInAdapter):
    """`tokens` `[rows, dim]` are what `get_image_features` of the whole model gives, in the order of placeholders."""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)
    kept: ClassVar[tuple[str, ...]] = (VISION, PROJECTOR)

    def __init__(self, model: PreTrainedModel, preprocessor: Preprocessor, width: int, device: torch.device) -> None:
        super().__init__(model, preprocessor, width, device)
        use_packed_attention(model.get_submodule(self.kept[0]))

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[all tiles, 3, height, width]` float32, padded with zeros to the largest picture; `tiles`
        `[items]` int64, how many of them each item has; what else the preprocessor gives, one after the other."""
        pixels = [item.tensors["pixel_values"] for item in items]
        height, width = (max(tiles.shape[side] for tiles in pixels) for side in (-2, -1))
        padded = [F.pad(tiles, (0, width - tiles.shape[-1], 0, height - tiles.shape[-2])) for tiles in pixels]
        others = items[0].tensors.keys() - {"pixel_values"}
        return {
            "pixel_values": torch.cat(padded),
            "tiles": torch.tensor([len(tiles) for tiles in pixels]),
            **{name: torch.cat([item.tensors[name] for item in items]) for name in sorted(others)},
        }

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        inputs = {name: tensor.to(self._device) for name, tensor in batch.items() if name != "tiles"}
        tiles = batch["tiles"].tolist()
        return [TowerOutput(tokens=rows) for rows in self.rows(inputs, tiles)[: len(tiles)]]

    def rows(self, inputs: dict[str, Tensor], tiles: list[int]) -> Sequence[Tensor]:
        """Each item's rows, of so many tiles each."""
        model: Any = self._model
        rows: Sequence[Tensor] | Tensor = model.get_image_features(**inputs).pooler_output
        if isinstance(rows, Tensor):  # `[all tiles, rows, dim]`
            return [item.flatten(0, 1) for item in torch.split(rows, tiles)]
        return rows


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 56,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The language half of a tiny configuration."""
