"""Pictures and sounds for models that no family here knows: the checkpoint's own processors, and what items cost."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.auto import processing_auto
from transformers.models.auto.feature_extraction_auto import AutoFeatureExtractor

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.errors import EncoderError, StartupError
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import LONGEST_S
from spmd_encoder.models.picture import image_processor, run_processor
from spmd_encoder.models.weights import from_folder

PATCH = 14
"""Pictures are priced as if every model had patches of so many pixels."""
_TOKENS_PER_S = 50.0
"""Sounds are priced as if every model had a row per 20 ms."""
_SIZES = ((1, 1), (64, 64), (224, 224), (300, 200), (300, 400), (640, 480), (1000, 333), (1024, 1024), (2048, 2048))
"""Of pictures that tell how prices go with sizes: some models cut a small one into more tiles than a large one."""
MARGIN = 1.25
_SHORT_S, _LONG_S = 1.0, 10.0
_CUT_S = (61.0, 122.0)
"""Beyond the window of every extractor that has one; they cut longer sounds, or take them in several windows."""


class Pictures:
    """The checkpoint's image processor, called as the whole processor of its model type would call it."""

    def __init__(self, folder: Path, model_type: str) -> None:
        """Raises StartupError where it cannot be had without torchvision."""
        self._processor = image_processor(folder)
        self._options = whole_defaults(model_type, "images_kwargs")

    def made(self, image: Image.Image) -> dict[str, Tensor]:
        """Its tensors for one picture. Raises EncoderError where it does not take it."""
        made = run_processor(self._processor, image, **self._options)
        # An older name, which Video-LLaVA's processor alone still gives and no model's method wants.
        return {name.replace("pixel_values_images", "pixel_values"): tensor for name, tensor in made.items()}

    def cost(self, made: Mapping[str, Tensor]) -> int:
        return max(1, math.ceil(values_of(made) / (3 * PATCH**2)))

    def cost_table(self) -> CostTable:
        return price_pictures(self._cost_of)

    def _cost_of(self, size: tuple[int, int]) -> int | None:
        try:
            return self.cost(self.made(Image.new("RGB", size)))
        except EncoderError:
            return None


def price_pictures(cost_of: Callable[[tuple[int, int]], int | None]) -> CostTable:
    """By area, within the costs of the least and the largest of some pictures, or all as the dearest of them where one
    of them costs more than that. `cost_of` a (width, height) is None where it is refused."""
    found = {size: cost for size in _SIZES if (cost := cost_of(size)) is not None}
    dearest = max(found.values(), default=1)
    if len(set(found.values())) <= 1:
        return CostTable(patch=PATCH, fixed_tokens=dearest)
    width, height = max(found)
    is_bounded = dearest * PATCH**2 * MARGIN < width * height
    by_area = CostTable(
        patch=PATCH,
        min_pixels=min(found.values()) * PATCH**2,
        max_pixels=dearest * PATCH**2 if is_bounded else 0,
    )
    if all(cost <= MARGIN * by_area.image_tokens(*size) for size, cost in found.items()):
        return by_area
    return CostTable(patch=PATCH, fixed_tokens=dearest)


class Sounds:
    """The checkpoint's feature extractor, called as the whole processor of its model type would call it."""

    def __init__(self, folder: Path, model_type: str) -> None:
        """Raises StartupError where it cannot be had, and where it cuts sounds at a length that it does not tell."""
        extractor: Any = from_folder(AutoFeatureExtractor, folder)
        self._extractor = extractor
        self._options = whole_defaults(model_type, "audio_kwargs")
        if "return_attention_mask" in inspect.signature(self._extractor.__call__).parameters:
            self._options["return_attention_mask"] = True
        self.rate = int(self._extractor.sampling_rate)
        self._per_token = self._size(_LONG_S) / (_TOKENS_PER_S * _LONG_S)
        self.max_s = self._most(folder)

    def made(self, sound: Sound) -> dict[str, Tensor]:
        """Its tensors for one sound."""
        options = {**self._options, "sampling_rate": sound.rate, "return_tensors": "pt"}
        return tensors_of(self._extractor([sound.samples], **options))

    def cost(self, made: Mapping[str, Tensor]) -> int:
        return max(1, math.ceil(values_of(made) / self._per_token))

    def cost_table(self) -> AudioCost:
        least_s = self._size(_SHORT_S) / self._per_token / _TOKENS_PER_S
        return AudioCost(tokens_per_s=_TOKENS_PER_S, min_s=least_s, max_s=self.max_s)

    def _most(self, folder: Path) -> float:
        """Seconds of the longest sound that is taken whole."""
        if self._size(_CUT_S[0]) < self._size(_CUT_S[1]):
            return LONGEST_S
        by_call = inspect.signature(self._extractor.__call__).parameters.get("max_length")
        said = (
            getattr(self._extractor, "n_samples", None),
            self._options.get("max_length"),
            by_call and by_call.default,
        )
        samples = next((one for one in said if isinstance(one, int)), None)
        if samples is None:
            raise StartupError(f"{folder}: its feature extractor cuts long sounds, and does not say at which length")
        return samples / self.rate

    def made_of_noise(self, seconds: float) -> dict[str, Tensor]:
        """Its tensors for a sound that any model should take."""
        samples = 0.1 * np.random.default_rng(0).standard_normal(int(seconds * self.rate), np.float32)
        return self.made(Sound(samples=samples, rate=self.rate))

    def _size(self, seconds: float) -> int:
        return values_of(self.made_of_noise(seconds))


def whole_defaults(model_type: str, kind: str) -> dict[str, Any]:
    """What the whole processor of the type calls its part with, unless it is asked for something else.

    The whole one is not made: it has a tokenizer, and often a video processor, which transformers has for torchvision
    only. Raises StartupError where even its class cannot be looked at without that.
    """
    names: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    name = names.get(model_type)
    try:
        cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        older = getattr(getattr(cls, "valid_processor_kwargs", None), "_defaults", None) or {}
        said = {**(getattr(cls, kind, None) or {}), **older.get(kind, {}), **older.get("common_kwargs", {})}
    except ImportError:
        raise StartupError(
            f"transformers has {name} for torchvision only, and what it asks for cannot be told"
        ) from None
    return {name: value for name, value in said.items() if name not in ("return_tensors", "sampling_rate", "device")}


def tensors_of(made: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}


def values_of(made: Mapping[str, Tensor]) -> int:
    """How many numbers the model takes of an item, masks and grids aside."""
    return max((tensor.numel() for tensor in made.values() if tensor.is_floating_point()), default=1)
