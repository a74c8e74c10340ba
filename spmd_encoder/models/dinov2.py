"""DINOv2: one vector per picture (the class token) and one per patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.dinov2.configuration_dinov2 import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Model

from spmd_encoder.api.types import OutputKind
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.fixed_size import FixedSizeAdapter, FixedSizePreprocessor, input_size
from spmd_encoder.models.sharding import Split, TowerPlan, run_batched
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower


def _plan(config: Any) -> TowerPlan:
    mlp = (
        Split(path="mlp", columns=("gate_proj", "up_proj"), row="down_proj")
        if config.use_swiglu_ffn
        else Split(path="mlp", columns=("fc1",), row="fc2")
    )
    attention = Split(
        path="attention",
        columns=("q_proj", "k_proj", "v_proj"),
        row="o_proj",
        heads="num_attention_heads",
        run=run_batched,
    )
    return TowerPlan(blocks="encoder.layer", num_blocks=config.num_hidden_layers, in_block=(attention, mlp))


class Dinov2Adapter(FixedSizeAdapter):
    """`pooled` `[hidden]` is transformers' `pooler_output` (the class token after the last norm), `tokens`
    `[patches, hidden]` is the rest of `last_hidden_state`."""

    model_types: ClassVar[tuple[str, ...]] = ("dinov2",)
    family = "dinov2"
    leading_rows = 1
    model_class: ClassVar[type[PreTrainedModel]] = Dinov2Model
    config_class: ClassVar[type[PreTrainedConfig]] = Dinov2Config

    @classmethod
    def load_preprocessor(cls, folder: Path) -> FixedSizePreprocessor:
        processor: Any = from_folder(BitImageProcessorPil, folder)
        config: Any = from_folder(cls.config_class, folder)
        # Any size will do: the model resamples its positions.
        return FixedSizePreprocessor(processor, input_size(processor, folder), config.patch_size)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(cls.config_class, folder)
        model = load_tower(cls.model_class, config, folder, "", _plan(config), context)
        dims = {OutputKind.TOKENS: int(config.hidden_size), OutputKind.POOLED: int(config.hidden_size)}
        return cls(model, preprocessor, dims, context.device)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        make: Any = cls.config_class
        config = make(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,  # not divisible by 4
            image_size=112,  # fewer positions than the 224 pixels below need, as real checkpoints have more
            patch_size=14,
        )
        processor = BitImageProcessorPil(
            size={"shortest_edge": 256},
            crop_size={"height": 224, "width": 224},
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
        write_random(cls.model_class, config, processor, out, seed)
