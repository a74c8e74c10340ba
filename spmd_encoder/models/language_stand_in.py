"""What families with a language half share: transformers' whole class, of which the encoding parts are read and the
language half is not even built. A stand-in of the same width, without a layer, takes its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.configuration_llama import LlamaConfig

from spmd_encoder.api.types import OutputKind
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes


class LanguageStandInAdapter(FamilyAdapter, ABC):
    """`tokens` `[rows, dim]`, as wide as the language model is."""

    model_class: ClassVar[type[PreTrainedModel]]
    config_class: ClassVar[type[PreTrainedConfig]]
    kept: ClassVar[tuple[str, ...]]
    """Paths of all that is read of the checkpoint."""

    def __init__(self, model: PreTrainedModel, preprocessor: Preprocessor, width: int, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        self.embedding_dims = {OutputKind.TOKENS: width}
        self.tower_bytes = real_bytes(model)

    @classmethod
    @abstractmethod
    def plan(cls, config: Any) -> TowerPlan:
        """How a model with this configuration is cut."""

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(cls.config_class, folder)
        width = int(config.text_config.hidden_size)
        config.text_config = stand_in(config.text_config)
        model = load_tower(cls.model_class, config, folder, cls.kept, cls.plan(config), context)
        return cls(model, preprocessor, width, context.device)

    def batch_key(self, features: Features) -> Hashable:
        return ()


def stand_in(text: Any) -> PreTrainedConfig:
    """A language model of the same width that costs nothing to build, of whichever family the real one is.

    The towers' code looks at no more of it than its width and its norm's epsilon.
    """
    return LlamaConfig(
        hidden_size=text.hidden_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        num_hidden_layers=0,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=1,
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
    )
