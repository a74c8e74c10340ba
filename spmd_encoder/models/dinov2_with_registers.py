"""DINOv2 with registers: as DINOv2, with rows beside the class token that stand for no patch and are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.dinov2_with_registers.configuration_dinov2_with_registers import Dinov2WithRegistersConfig
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersModel

from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.dinov2 import Dinov2Adapter
from spmd_encoder.models.weights import from_folder


class Dinov2WithRegistersAdapter(Dinov2Adapter):
    """Outputs as `Dinov2Adapter`'s."""

    model_types: ClassVar[tuple[str, ...]] = ("dinov2_with_registers",)
    family = "dinov2_with_registers"
    model_class: ClassVar[type[PreTrainedModel]] = Dinov2WithRegistersModel
    config_class: ClassVar[type[PreTrainedConfig]] = Dinov2WithRegistersConfig

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        adapter = super().load(folder, context)
        config: Any = from_folder(cls.config_class, folder)
        adapter.leading_rows = 1 + int(config.num_register_tokens)
        return adapter
