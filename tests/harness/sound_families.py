"""How transformers' whole model of each family is asked for one sound. A new family adds its line to `SOUNDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor

from spmd_encoder.media.base import Sound

SoundReference = Callable[[Any, Any, Sound], tuple[Tensor, Tensor | None]]
"""(whole model, its feature extractor, a sound) to (tokens, pooled)."""


def _features(extractor: Any, sound: Sound, **options: Any) -> Mapping[str, Tensor]:
    made: Mapping[str, Tensor] = extractor(
        sound.samples, sampling_rate=sound.rate, return_tensors="pt", return_attention_mask=True, **options
    )
    return made


def _whisper(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    features = _features(extractor, sound)["input_features"]
    return model.get_encoder()(features).last_hidden_state[0], None


def _qwen2_audio(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    """What the whole model puts in the place of its placeholders: caught at the door of the language model."""
    made = _features(extractor, sound, padding="max_length")
    mask = made["attention_mask"]
    count = (((int(mask.sum()) - 1) // 2 + 1) - 2) // 2 + 1
    caught: list[Tensor] = []

    def catch(_: Any, __: Any, given: Mapping[str, Any]) -> None:
        caught.append(given["inputs_embeds"])

    token = model.config.audio_token_id
    ids = torch.tensor([[5, *[token] * count, 6, 7]])
    hook = model.model.language_model.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=made["input_features"],
            feature_attention_mask=mask,
        )
    finally:
        hook.remove()
    return caught[0][0, 1 : 1 + count], None


def _omni(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    """As Qwen2.5-Omni's whole processor calls its extractor: padded to the most that the model takes."""
    made = _features(extractor, sound, padding="max_length")
    rows = model.get_audio_features(made["input_features"], made["attention_mask"]).last_hidden_state
    return rows, None


def _omni3(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    """As Qwen3-Omni's whole processor calls its extractor."""
    made = _features(extractor, sound, padding=True, truncation=False)
    rows = model.get_audio_features(made["input_features"], made["attention_mask"]).last_hidden_state
    return rows, None


def _qwen3_asr(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    made = _features(extractor, sound, padding=True, truncation=False)
    return model.get_audio_features(made["input_features"], made["attention_mask"]).pooler_output, None


def _clap(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    """With the middle in the place of what is drawn at random."""
    with (
        mock.patch.object(np.random, "choice", lambda places: places[len(places) // 2]),
        mock.patch.object(np.random, "randint", lambda low, high: (low + high) // 2),
    ):
        made = extractor(sound.samples, sampling_rate=sound.rate, return_tensors="pt")
    out = model.get_audio_features(**made)
    return out.last_hidden_state[0].flatten(1).T, out.pooler_output[0]


def _voxtral(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    """As `VoxtralProcessor._retrieve_input_features`."""
    whole = _features(extractor, sound, padding=True, truncation=False, pad_to_multiple_of=extractor.n_samples)
    features = whole["input_features"].reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)
    return model.get_audio_features(features).pooler_output, None


def _windows(extractor: Any, sound: Sound) -> Mapping[str, Tensor]:
    """As `AudioFlamingo3Processor._process_audio`."""
    size = extractor.n_samples
    windows = [sound.samples[at : at + size] for at in range(0, len(sound.samples), size)]
    made: Mapping[str, Tensor] = extractor(
        windows, sampling_rate=sound.rate, return_tensors="pt", return_attention_mask=True
    )
    return made


def _flamingo(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    made = _windows(extractor, sound)
    return model.get_audio_features(made["input_features"], made["attention_mask"]).pooler_output, None


def _music_flamingo(model: Any, extractor: Any, sound: Sound) -> tuple[Tensor, Tensor | None]:
    made = _windows(extractor, sound)
    count = int((((made["attention_mask"].sum(-1) - 1) // 2 + 1) // 2).sum())
    ids = torch.tensor([[1, 2, *[model.config.audio_token_id] * count, 3]])
    out = model.get_audio_features(made["input_features"], made["attention_mask"], ids)
    return out.pooler_output, None


SOUNDS: dict[str, tuple[str, str, SoundReference]] = {
    "whisper": ("WhisperModel", "WhisperFeatureExtractor", _whisper),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "WhisperFeatureExtractor", _qwen2_audio),
    "qwen2_5_omni": ("Qwen2_5OmniThinkerForConditionalGeneration", "WhisperFeatureExtractor", _omni),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration", "WhisperFeatureExtractor", _omni3),
    "qwen3_asr": ("Qwen3ASRForConditionalGeneration", "Qwen3ASRFeatureExtractor", _qwen3_asr),
    "clap": ("ClapModel", "ClapFeatureExtractor", _clap),
    "voxtral": ("VoxtralForConditionalGeneration", "WhisperFeatureExtractor", _voxtral),
    "audioflamingo3": ("AudioFlamingo3ForConditionalGeneration", "WhisperFeatureExtractor", _flamingo),
    "musicflamingo": ("MusicFlamingoForConditionalGeneration", "WhisperFeatureExtractor", _music_flamingo),
    "glmasr": ("GlmAsrForConditionalGeneration", "WhisperFeatureExtractor", _flamingo),
}
"""Family to (class of the whole model, of its feature extractor, how it is asked)."""


LEVELS = {"qwen3_omni_moe": 3}
"""Families whose pictures' rows are so many times as wide as those of sounds, which have no deepstack levels."""


class WholeSoundModel:
    """The checkpoint in `folder` as transformers runs it, language half and all, in float32."""

    def __init__(self, family: str, folder: Path) -> None:
        name, extractor, self._ask = SOUNDS[family]
        models: Any = transformers  # its classes are only partly typed
        self.model = getattr(models, name).from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor = getattr(models, extractor).from_pretrained(folder)

    def encode(self, sound: Sound) -> tuple[Tensor, Tensor | None]:
        """(`tokens` `[rows, dim]`, `pooled` `[dim]` or None) of one sound."""
        with torch.inference_mode():
            return self._ask(self.model, self.extractor, sound)
