"""Voxtral's encoder and projector: 375 rows for each 30 s of a sound, whose last 30 s are filled up with silence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.voxtral.configuration_voxtral import VoxtralConfig
from transformers.models.voxtral.modeling_voxtral import VoxtralForConditionalGeneration
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import check_mels, check_window, extract, whisper_plan
from spmd_encoder.models.audio_language import (
    PROJECTOR_SPLIT,
    TINY_QWEN2,
    TOWER,
    WindowAdapter,
    WindowPreprocessor,
)
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder


class VoxtralPreprocessor(WindowPreprocessor):
    """The spectrogram is one of the whole sound, silence and all, and is cut afterwards."""

    def windows(self, sound: Sound) -> tuple[Tensor, Tensor]:
        size, most = int(self.extractor.n_samples), int(self.extractor.nb_max_frames)
        made = extract(self.extractor, sound, padding=True, truncation=False, pad_to_multiple_of=size)
        mels = made["input_features"].shape[1]
        features = made["input_features"][0].reshape(mels, -1, most).transpose(0, 1).contiguous()
        return features, made["attention_mask"][0].reshape(-1, most).sum(-1)


class VoxtralAdapter(WindowAdapter):
    """`tokens` are `get_audio_features`: silence counts, as the language model takes it."""

    model_types = ("voxtral",)
    family = "voxtral"
    model_class = VoxtralForConditionalGeneration
    config_class = VoxtralConfig

    @classmethod
    def load_preprocessor(cls, folder: Path) -> VoxtralPreprocessor:
        extractor: Any = from_folder(WhisperFeatureExtractor, folder)
        config: Any = from_folder(VoxtralConfig, folder)
        audio = config.audio_config
        check_mels(audio.num_mel_bins, extractor, folder)
        check_window(audio.max_source_positions, extractor, folder)
        rows = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
        return VoxtralPreprocessor(extractor, lambda _: rows, min_frames=1, max_s=float("inf"))

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return whisper_plan(f"{TOWER}.layers", config.audio_config.num_hidden_layers, once=(PROJECTOR_SPLIT,))

    def encode(self, features: Tensor, frames: Tensor, windows: Sequence[int]) -> Tensor:
        hidden: Tensor = self.tower(features).last_hidden_state
        # Four neighbours become one row.
        rows: Tensor = self.projector(hidden.reshape(len(hidden), -1, self.projector.linear_1.in_features))
        return rows

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = VoxtralConfig(
            audio_config={
                "model_type": "voxtral_encoder",
                "num_mel_bins": 16,
                "hidden_size": 48,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "max_source_positions": 100,
            },
            text_config={**TINY_QWEN2, "model_type": "llama", "head_dim": 10},
            audio_token_id=60,
        )
        make: Any = WhisperFeatureExtractor
        write_random(cls.model_class, config, make(feature_size=16, chunk_length=2), out, seed)
