"""A model of transformers that no family here knows: its class, what it is asked for, and what it gives for an item."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import AutoConfig

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.models.building import built
from spmd_encoder.models.checkpoint import read_config
from spmd_encoder.models.fallback_shapes import ShapeRun
from spmd_encoder.models.weights import from_folder

METHODS: Mapping[Modality, str] = MappingProxyType(
    {
        Modality.IMAGE: "get_image_features",
        Modality.AUDIO: "get_audio_features",
        Modality.VIDEO: "get_video_features",
    }
)
_MASKS = ("attention_mask", "input_features_mask", "feature_attention_mask", "padding_mask", "input_values_mask")
"""Names of one and the same, the mask of what is no padding, in extractors and in models."""

_REMEMBERED = 1000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`rows` of `dim` values each; `touched` are the names of the model's weights that they come of."""

    rows: int
    dim: int
    touched: frozenset[str]


class UnknownModelError(Exception):
    """The model gives nothing for an item that could be told as rows; the message says what it gives."""


class FeatureModel:
    """transformers' model of a checkpoint, without any weight's value: what is said here costs no memory."""

    def __init__(self, folder: Path) -> None:
        config: Any = from_folder(AutoConfig, folder)
        self.config: PreTrainedConfig = config
        self.model = _first_with_features(folder, config)
        self.cls = type(self.model)
        self._known: dict[Hashable, Outcome] = {}

    def methods(self) -> tuple[Modality, ...]:
        """What the model has a method for."""
        return tuple(modality for modality in METHODS if _owner(self.model, modality) is not None)

    def takes(self, modality: Modality) -> frozenset[str]:
        """The names of what the model's method takes."""
        return frozenset(_parameters(self.model, modality))

    def inputs(self, modality: Modality, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of what a processor made of one item that which the model's method takes, contiguous.

        Raises UnknownModelError where it wants more.
        """
        taken = _parameters(self.model, modality)
        found = {name: tensor for name, tensor in made.items() if name in taken}
        spare = [name for name in _MASKS if name in made and name not in taken]
        wanted = [name for name in _MASKS if name in taken and name not in made]
        if len(spare) == len(wanted) == 1:
            found[wanted[0]] = made[spare[0]]
        missing = [name for name, needed in taken.items() if needed and name not in found]
        if missing:
            raise UnknownModelError(f"its {METHODS[modality]} wants {missing[0]}, which its processor does not make")
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def outcome(self, modality: Modality, inputs: Mapping[str, Tensor]) -> Outcome:
        """What `encode` would give. It is remembered for items of the same sizes, masks and grids."""
        key = (modality, *(_facts(name, tensor) for name, tensor in inputs.items()))
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.clear()
            run = ShapeRun(self.model)
            with torch.inference_mode(), run:
                rows, dim = encode(self.model, modality, inputs).shape
            self._known[key] = Outcome(rows=rows, dim=dim, touched=frozenset(run.touched))
        return self._known[key]

    def work(self, modality: Modality, inputs: Mapping[str, Tensor]) -> int:
        """Floating-point operations of `encode`, as far as they are in products of matrices."""
        counter = FlopCounterMode(display=False)
        with torch.inference_mode(), counter, ShapeRun(self.model):
            encode(self.model, modality, inputs)
        return counter.get_total_flops()

    def parts(self) -> list[str]:
        """Paths of the model's largest parts, towers and language models among them, and of its own parameters."""
        inner = self.model.base_model
        holders = [self.model] if inner is self.model else [self.model, inner]
        names = {id(module): name for name, module in self.model.named_modules()}
        return [
            ".".join(filter(None, (names[id(holder)], name)))
            for holder in holders
            for name, child in [*holder.named_children(), *holder.named_parameters(recurse=False)]
            if child is not inner
        ]


def encode(model: PreTrainedModel, modality: Modality, inputs: Mapping[str, Tensor]) -> Tensor:
    """`[rows, dim]`: what the model's own method gives for one item, the levels of a deep stack beside each other.

    Raises UnknownModelError where that is neither rows nor a list of rows.
    """
    given = getattr(_owner(model, modality), METHODS[modality])(**inputs)
    found = given if isinstance(given, Tensor) else getattr(given, "pooler_output", None)
    mask = getattr(given, "attention_mask", None)
    if isinstance(found, Tensor) and isinstance(mask, Tensor) and mask.shape == found.shape[:-1]:
        found = found[mask.bool()]
    rows = _joined(found, modality)
    levels = [_joined(level, modality) for level in getattr(given, "deepstack_features", None) or ()]
    if any(len(level) != len(rows) for level in levels):
        raise UnknownModelError(f"its {METHODS[modality]} gives levels of other lengths than its rows")
    return torch.cat([rows, *levels], dim=-1) if levels else rows


def _facts(name: str, tensor: Tensor) -> Hashable:
    """All of a mask or grid, and of other tensors the shape."""
    return name, tuple(tensor.shape), None if tensor.is_floating_point() else tensor.numpy().tobytes()


def _joined(found: Any, modality: Modality) -> Tensor:
    pieces = list(found) if isinstance(found, list | tuple) else [found]
    if not pieces or not all(isinstance(piece, Tensor) and piece.ndim in (2, 3) for piece in pieces):
        raise UnknownModelError(f"its {METHODS[modality]} gives no rows as `pooler_output`")
    return torch.cat([piece.flatten(0, -2) for piece in pieces])


def _owner(model: PreTrainedModel, modality: Modality) -> Any:
    """The model, or the one that it wraps, whichever has the method; None where neither has."""
    return next((one for one in (model, model.base_model) if hasattr(one, METHODS[modality])), None)


def _parameters(model: PreTrainedModel, modality: Modality) -> dict[str, bool]:
    """What the method takes, and whether it must. Some only pass on what the wrapped model's method takes."""
    found: dict[str, bool] = {}
    for one in (model, model.base_model):
        method = getattr(one, METHODS[modality], None)
        for parameter in inspect.signature(method).parameters.values() if method else ():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter.default is parameter.empty)
    return found


def _first_with_features(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """On meta. Raises StartupError where transformers has no such class, or one that cannot be built."""
    for cls in _classes(folder, config):
        model = built(cls, config, folder, torch.float32)
        if any(_owner(model, modality) is not None for modality in METHODS):
            model.train(False)
            return model
    raise StartupError(
        f"{folder}: transformers has no class with {' or '.join(METHODS.values())} for model type "
        f"{config.model_type!r}, so this checkpoint cannot be served"
    )


def _classes(folder: Path, config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Of transformers' own: the one that the checkpoint was saved from, then those that are made for its type."""
    named = read_config(folder).get("architectures")
    mappings: tuple[Mapping[str, Any], ...] = (
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    )
    for name in [*(named if isinstance(named, list) else ()), *(m.get(config.model_type) for m in mappings)]:
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            yield cls
