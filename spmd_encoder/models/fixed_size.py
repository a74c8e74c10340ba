"""What families with one input size share: a batch is one stack of pictures of equal size."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import FamilyAdapter, Features, Preprocessor, TowerOutput
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.weights import real_bytes


class FixedSizePreprocessor(Preprocessor):
    """`pixel_values` `[1, 3, height, width]`, of `size` (height, width) whatever the picture's was."""

    def __init__(self, processor: Any, size: tuple[int, int], patch: int) -> None:
        self._processor = processor
        self._patch = patch
        self._grid = (1, size[0] // patch, size[1] // patch)

    def cost_table(self) -> CostTable:
        return CostTable(patch=self._patch, fixed_tokens=self._grid[1] * self._grid[2])

    def preprocess(self, image: Image.Image) -> Features:
        patches = self._grid[1] * self._grid[2]
        pixels = run_processor(self._processor, image)["pixel_values"]
        return Features(tensors={"pixel_values": pixels}, num_tokens=patches, cost=patches, grid=self._grid)


class FixedSizeAdapter(FamilyAdapter):
    """`tokens` are the patches' rows of `last_hidden_state`, row by row of the picture."""

    modalities = (Modality.IMAGE,)
    leading_rows: int = 0
    """Rows of `last_hidden_state` before the patches (class token, registers), which are no part of `tokens`."""

    def __init__(
        self,
        model: PreTrainedModel,
        preprocessor: Preprocessor,
        embedding_dims: Mapping[OutputKind, int],
        device: torch.device,
    ) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        self.embedding_dims = embedding_dims
        self.tower_bytes = real_bytes(model)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[items, 3, height, width]` float32."""
        return {"pixel_values": torch.cat([item.tensors["pixel_values"] for item in items])}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        out = self._model(pixel_values=batch["pixel_values"].to(self._device, self._model.dtype))
        return TowerOutput.of_batch(out.last_hidden_state[:, self.leading_rows :], self.pooled(out))

    def pooled(self, out: Any) -> Tensor | None:
        """`[items, dim]` out of what the model gives, None where the model has no pooled output."""
        pooled: Tensor | None = out.pooler_output
        return pooled


def input_size(processor: Any, folder: Path) -> tuple[int, int]:
    """(height, width) that the processor gives every picture. Raises StartupError where it gives none."""
    size = processor.crop_size if processor.do_center_crop else processor.size if processor.do_resize else None
    if not size or not size.get("height") or not size.get("width"):
        raise StartupError(f"{folder}: preprocessor_config.json does not bring pictures to one size, which is needed")
    return int(size["height"]), int(size["width"])


def input_size_of(config: Any, processor: Any, folder: Path) -> tuple[int, int]:
    """`input_size` for a tower that takes pictures of `image_size` only. Raises StartupError where it is another."""
    return _same_size(input_size(processor, folder), (config.image_size, config.image_size), folder)


def tile_side(image_size: Sequence[int], processor: Any, folder: Path) -> int:
    """Pixels of the square tiles that processor and tower agree on. Raises StartupError where they do not."""
    size = _same_size(input_size(processor, folder), (image_size[0], image_size[1]), folder)
    if size[0] != size[1]:
        raise StartupError(f"{folder}: preprocessor_config.json makes tiles that are no squares")
    return size[0]


def _same_size(size: tuple[int, int], wanted: tuple[int, int], folder: Path) -> tuple[int, int]:
    if size != wanted:
        raise StartupError(
            f"{folder}: preprocessor_config.json makes pictures of {size[1]} x {size[0]} pixels, "
            f"but config.json asks for {wanted[1]} x {wanted[0]}"
        )
    return size
