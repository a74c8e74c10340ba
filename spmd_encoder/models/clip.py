"""CLIP: one vector per picture in the space of texts, and one row per patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.clip.configuration_clip import CLIPConfig, CLIPVisionConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.clip.modeling_clip import CLIPModel, CLIPVisionModel, CLIPVisionModelWithProjection

from spmd_encoder.api.types import OutputKind
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.checkpoint import read_config, shard_keys
from spmd_encoder.models.contrastive import TINY_TEXT, TINY_VISION, encoder_plan
from spmd_encoder.models.fixed_size import FixedSizeAdapter, FixedSizePreprocessor, input_size_of
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower

_PROJECTION = "visual_projection.weight"


class ClipAdapter(FixedSizeAdapter):
    """`pooled` `[projection_dim]` is `get_image_features`, not normalised. `tokens` `[patches, hidden]` is
    `last_hidden_state` without the class token, so that rows and patches of the grid are the same.

    `last_hidden_state` is the last layer's output before any norm. LLaVA's own models were trained on the layer
    before it, which is not served. A checkpoint of the vision half that has no projection pools as
    `CLIPVisionModel` does: the class token after the last norm, `[hidden]`.
    """

    model_types = ("clip", "clip_vision_model")
    family = "clip"
    leading_rows = 1

    @classmethod
    def load_preprocessor(cls, folder: Path) -> FixedSizePreprocessor:
        processor: Any = from_folder(CLIPImageProcessorPil, folder)
        config, _ = _vision_config(folder)
        return FixedSizePreprocessor(processor, input_size_of(config, processor, folder), config.patch_size)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> ClipAdapter:
        preprocessor = cls.load_preprocessor(folder)
        config, whole = _vision_config(folder)
        if whole or any(_PROJECTION in keys for keys in shard_keys(folder).values()):
            plan = encoder_plan("vision_model.encoder.layers", config)
            model: Any = load_tower(CLIPVisionModelWithProjection, config, folder, "", plan, context)
            width = config.projection_dim
        else:
            model = load_tower(CLIPVisionModel, config, folder, "", encoder_plan("encoder.layers", config), context)
            width = config.hidden_size
        dims = {OutputKind.TOKENS: int(config.hidden_size), OutputKind.POOLED: int(width)}
        return cls(model, preprocessor, dims, context.device)

    def pooled(self, out: Any) -> Tensor:
        projected = isinstance(self._model, CLIPVisionModelWithProjection)
        pooled: Tensor = out.image_embeds if projected else out.pooler_output
        return pooled

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = CLIPConfig(
            text_config=TINY_TEXT,
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14},
            projection_dim=40,
        )
        processor = CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
        write_random(CLIPModel, config, processor, out, seed)


def _vision_config(folder: Path) -> tuple[Any, bool]:
    """The vision half's configuration, and whether the checkpoint has the language half too."""
    if not {"vision_config", "vision_config_dict"} & read_config(folder).keys():
        return from_folder(CLIPVisionConfig, folder), False
    whole: Any = from_folder(CLIPConfig, folder)
    # The whole model's number is the one that counts; the vision half's own copy of it may be another.
    whole.vision_config.projection_dim = whole.projection_dim
    return whole.vision_config, True
