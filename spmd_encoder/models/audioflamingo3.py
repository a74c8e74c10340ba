"""Audio Flamingo 3 and Music Flamingo: one row per 40 ms of sound, in windows of 30 s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.audioflamingo3.configuration_audioflamingo3 import AudioFlamingo3Config
from transformers.models.audioflamingo3.modeling_audioflamingo3 import AudioFlamingo3ForConditionalGeneration
from transformers.models.musicflamingo.configuration_musicflamingo import MusicFlamingoConfig
from transformers.models.musicflamingo.modeling_musicflamingo import (
    MusicFlamingoForConditionalGeneration,
    apply_rotary_time_emb,
)
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.models.audio import check_mels, key_mask, whisper_plan
from spmd_encoder.models.audio_language import (
    PROJECTOR,
    PROJECTOR_SPLIT,
    TINY_QWEN2,
    TOWER,
    WindowAdapter,
    WindowPreprocessor,
    longest_sound,
)
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder

_MIN_FRAMES = 3
"""Of the extractor: with fewer no row would come out."""


def _num_rows(frames: int) -> int:
    return ((frames - 1) // 2 + 1) // 2


class AudioFlamingo3Adapter(WindowAdapter):
    """`tokens` are `get_audio_features` of the whole model."""

    model_types: ClassVar[tuple[str, ...]] = ("audioflamingo3",)
    family: ClassVar[str] = "audioflamingo3"
    model_class: ClassVar[type[PreTrainedModel]] = AudioFlamingo3ForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = AudioFlamingo3Config
    longest_s: ClassVar[float] = 600.0
    """What the family's processor takes unless its file says otherwise."""

    @classmethod
    def load_preprocessor(cls, folder: Path) -> WindowPreprocessor:
        extractor: Any = from_folder(WhisperFeatureExtractor, folder)
        config: Any = from_folder(cls.config_class, folder)
        check_mels(config.audio_config.num_mel_bins, extractor, folder)
        most = longest_sound(folder, cls.longest_s)
        return WindowPreprocessor(extractor, _num_rows, min_frames=_MIN_FRAMES, max_s=most)

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return whisper_plan(f"{TOWER}.layers", config.audio_config.encoder_layers, once=(PROJECTOR_SPLIT,))

    def encode(self, features: Tensor, frames: Tensor, windows: Sequence[int]) -> Tensor:
        """As `AudioFlamingo3Encoder.forward`, with a mask that does not grow with the square of the window."""
        tower = self.tower
        hidden = F.gelu(tower.conv2(F.gelu(tower.conv1(features)))).permute(0, 2, 1) + tower.embed_positions.weight
        mask = key_mask((frames - 1) // 2 + 1, hidden.shape[1])
        for layer in tower.layers:
            hidden = layer(hidden, mask)
        hidden = tower.layer_norm(tower.avg_pooler(hidden.permute(0, 2, 1)).permute(0, 2, 1))
        rows: Tensor = self.projector(self.timed(hidden, windows))
        return rows

    def timed(self, hidden: Tensor, windows: Sequence[int]) -> Tensor:
        """The tower's rows as the projector takes them."""
        return hidden

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        make: Any = cls.config_class
        config = make(
            audio_config={
                "model_type": "audioflamingo3_encoder",
                "num_mel_bins": 16,
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "intermediate_size": 100,
                "max_source_positions": 100,
            },
            text_config=TINY_QWEN2,
            audio_token_id=60,
        )
        extractor: Any = WhisperFeatureExtractor
        write_random(cls.model_class, config, extractor(feature_size=16, chunk_length=2), out, seed)


class MusicFlamingoAdapter(AudioFlamingo3Adapter):
    """As Audio Flamingo 3's, with rows that are rotated by their time in the sound."""

    model_types = ("musicflamingo",)
    family = "musicflamingo"
    model_class = MusicFlamingoForConditionalGeneration
    config_class = MusicFlamingoConfig
    kept = (TOWER, PROJECTOR, "model.pos_emb")
    longest_s = 1200.0

    def timed(self, hidden: Tensor, windows: Sequence[int]) -> Tensor:
        model: Any = self._model
        count = hidden.shape[1]
        step = model.config.audio_frame_step * 4  # a row is four frames
        starts = torch.cat([torch.arange(n) for n in windows]).to(hidden.device)
        offsets = torch.arange(count, device=hidden.device, dtype=torch.float32) * step
        cos, sin = model.model.pos_emb(starts[:, None] * count * step + offsets, seq_len=count)
        rotate: Any = apply_rotary_time_emb
        rotated: Tensor = rotate(hidden, cos, sin)
        return rotated
