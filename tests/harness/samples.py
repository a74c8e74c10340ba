"""A few items of every modality that a family takes, as features, and what transformers' whole model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skimage.data
import torch
from PIL import Image
from torch import Tensor

from spmd_encoder.api.types import Modality
from spmd_encoder.models.base import FamilyAdapter, Features, Preprocessor, TowerOutput
from tests.harness.clips import film, sound
from tests.harness.families import WholeModel
from tests.harness.film_families import FILM_REFERENCES
from tests.harness.sound_families import WholeSoundModel


@dataclass(frozen=True)
class Sample:
    features: Features
    tokens: Tensor
    pooled: Tensor | None


def pictures() -> list[Image.Image]:
    photos: Any = skimage.data
    cat = Image.fromarray(photos.chelsea())
    return [cat.resize((150, 224)), cat.resize((300, 120)), cat.resize((40, 40))]


def features_of(preprocessor: Preprocessor, modality: Modality) -> list[Features]:
    match modality:
        case Modality.IMAGE:
            return [preprocessor.preprocess(picture) for picture in pictures()]
        case Modality.AUDIO:
            return [preprocessor.preprocess_audio(one) for one in _sounds(preprocessor)]
        case Modality.VIDEO:
            return [preprocessor.preprocess_video(film(count, 84, 60)) for count in (4, 1, 6)]


def samples(adapter: FamilyAdapter, folder: Path) -> list[Sample]:
    """Of the checkpoint in `folder`, which `adapter` has loaded."""
    found = []
    for modality in adapter.modalities:
        features = features_of(adapter.preprocessor, modality)
        answers = _answers(adapter, folder, modality, features)
        found += [Sample(item, *answer) for item, answer in zip(features, answers, strict=True)]
    return found


def forwards(adapter: FamilyAdapter, features: Sequence[Features]) -> list[TowerOutput]:
    """All of them in as few batches as may be, in order."""
    by_key: dict[Any, list[int]] = {}
    for index, item in enumerate(features):
        by_key.setdefault((item.modality, adapter.batch_key(item)), []).append(index)
    outputs: dict[int, TowerOutput] = {}
    with torch.inference_mode():
        for batch in by_key.values():
            made = adapter.forward(adapter.pack([features[index] for index in batch]))
            outputs.update(zip(batch, made, strict=True))
    return [outputs[index] for index in range(len(features))]


def _sounds(preprocessor: Preprocessor) -> list[Any]:
    return [sound(seconds, preprocessor.sampling_rate) for seconds in (0.7, 1.9, 0.07)]


def _answers(
    adapter: FamilyAdapter, folder: Path, modality: Modality, features: Sequence[Features]
) -> list[tuple[Tensor, Tensor | None]]:
    match modality:
        case Modality.IMAGE:
            whole = WholeModel(adapter.family, folder)
            return [whole.encode(picture) for picture in pictures()]
        case Modality.AUDIO:
            whole_sound = WholeSoundModel(adapter.family, folder)
            return [whole_sound.encode(one) for one in _sounds(adapter.preprocessor)]
        case Modality.VIDEO:
            model = WholeModel(adapter.family, folder).model
            with torch.inference_mode():
                return [(FILM_REFERENCES[adapter.family](model, item.tensors), None) for item in features]
