"""DINOv3's convolutional networks: one vector per picture (the mean of the last map) and one per field of the map."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers.models.dinov3_convnext.configuration_dinov3_convnext import DINOv3ConvNextConfig
from transformers.models.dinov3_convnext.modeling_dinov3_convnext import DINOv3ConvNextModel

from spmd_encoder.api.types import OutputKind
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.dinov3_pictures import DINOv3Processor
from spmd_encoder.models.fixed_size import FixedSizeAdapter, FixedSizePreprocessor
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower


def _run_pointwise(layer: nn.Module, hidden: Tensor) -> Tensor:
    block: Any = layer
    out: Tensor = block.pointwise_conv2(block.activation_fn(block.pointwise_conv1(hidden)))
    return out


def _plan(config: Any) -> TowerPlan:
    """What is cut of each layer holds nearly all of its weights. Convolutions stay whole."""
    pointwise = Split(path="", columns=("pointwise_conv1",), row="pointwise_conv2", run=_run_pointwise)
    first, *others = (
        TowerPlan(blocks=f"model.stages.{stage}.layers", num_blocks=depth, in_block=(pointwise,))
        for stage, depth in enumerate(config.depths)
    )
    return TowerPlan(blocks=first.blocks, num_blocks=first.num_blocks, in_block=first.in_block, others=tuple(others))


class DINOv3ConvNextAdapter(FixedSizeAdapter):
    """`pooled` `[hidden]` is transformers' `pooler_output` (the mean of the last stage's map, after the last norm),
    `tokens` `[fields, hidden]` is what follows it in `last_hidden_state`, row by row of the map."""

    model_types = ("dinov3_convnext",)
    family = "dinov3_convnext"
    leading_rows = 1

    @classmethod
    def load_preprocessor(cls, folder: Path) -> FixedSizePreprocessor:
        processor = DINOv3Processor.from_folder(folder)
        config: Any = from_folder(DINOv3ConvNextConfig, folder)
        # The first stage takes fields of 4 pixels a side, each further one joins 2 x 2.
        return FixedSizePreprocessor(processor, processor.size, 4 * 2 ** (config.num_stages - 1))

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(DINOv3ConvNextConfig, folder)
        model = load_tower(DINOv3ConvNextModel, config, folder, "", _plan(config), context)
        width = int(config.hidden_sizes[-1])
        return cls(model, preprocessor, {OutputKind.TOKENS: width, OutputKind.POOLED: width}, context.device)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = DINOv3ConvNextConfig(hidden_sizes=[16, 24, 40, 56], depths=[1, 2, 2, 1])
        write_random(DINOv3ConvNextModel, config, DINOv3Processor(size=(112, 144)), out, seed)
