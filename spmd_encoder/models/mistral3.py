"""Mistral 3: Pixtral's tower, four patches to a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.mistral3.configuration_mistral3 import Mistral3Config
from transformers.models.mistral3.modeling_mistral3 import Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from spmd_encoder.models.base import Features
from spmd_encoder.models.pixtral import TINY_PIXTRAL, PixtralPreprocessor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import tower_plan
from spmd_encoder.models.vision_language import PROJECTOR, TINY_LLAMA, VISION, VisionLanguageAdapter
from spmd_encoder.models.weights import from_folder


def _run_projector(projector: Any, hidden: Tensor) -> Tensor:
    """Over the patches of one picture that is four high."""
    patch = projector.patch_merger.patch_size
    out: Tensor = projector(hidden, [(4 * patch, len(hidden) // 4 * patch)])
    return out


class Mistral3Adapter(VisionLanguageAdapter):
    """`tokens` `[h * w / merge**2, dim]`, row by row; `grid` is `(1, h, w)` in patches.

    The breaks between rows and the end of a picture are the language model's own tokens, and not among them.
    """

    model_types = ("mistral3",)
    family = "mistral3"
    model_class = Mistral3ForConditionalGeneration
    config_class = Mistral3Config

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        projection = Split(path=PROJECTOR, columns=("linear_1",), row="linear_2", run=_run_projector)
        return tower_plan(VISION, config.vision_config, projection)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> PixtralPreprocessor:
        config: Any = from_folder(Mistral3Config, folder)
        processor = from_folder(PixtralImageProcessorPil, folder)
        return PixtralPreprocessor(processor, config.vision_config, folder, merge=config.spatial_merge_size)

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """As the others'. A picture of one row goes twice where it is alone: transformers takes the only row for the
        batch's dimension, and drops that."""
        batch = super().pack(items if len(items) > 1 or items[0].num_tokens > 1 else [*items, *items])
        return {**batch, "tiles": batch["tiles"][: len(items)]}

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Mistral3Config(
            vision_config=TINY_PIXTRAL,
            text_config={**TINY_LLAMA, "model_type": "mistral"},
            image_token_index=60,
            spatial_merge_size=2,
        )
        processor = PixtralImageProcessorPil(size={"longest_edge": 336}, patch_size={"height": 14, "width": 14})
        write_random(cls.model_class, config, processor, out, seed)
