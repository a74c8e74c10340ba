"""GLM-ASR: one row per 80 ms of sound, in windows of 30 s that attend to their padding too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glmasr.configuration_glmasr import GlmAsrConfig
from transformers.models.glmasr.modeling_glmasr import GlmAsrForConditionalGeneration
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.models.audio import check_mels
from spmd_encoder.models.audio_language import (
    PROJECTOR_SPLIT,
    TINY_QWEN2,
    TOWER,
    WindowAdapter,
    WindowPreprocessor,
    longest_sound,
)
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder

_LONGEST_S = 655.0
"""What the family's processor takes unless its file says otherwise."""
_MERGED = 4
_MIN_FRAMES = 7
"""Of the extractor: with fewer no row would come out."""


def _num_rows(frames: int) -> int:
    return ((frames - 1) // 2 + 1) // _MERGED


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over one window. Half of each head is rotated."""
    width = int(attention.head_dim) // 2  # type: ignore[arg-type]
    angle = torch.linspace(0, 6, len(hidden), device=hidden.device)[None, :, None].repeat(1, 1, width)
    positions = (angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype))
    out: Tensor = attention(hidden[None], position_embeddings=positions)[0]
    return out[0]


class GlmAsrAdapter(WindowAdapter):
    """`tokens` are `get_audio_features` of the whole model."""

    model_types = ("glmasr",)
    family = "glmasr"
    model_class = GlmAsrForConditionalGeneration
    config_class = GlmAsrConfig

    @classmethod
    def load_preprocessor(cls, folder: Path) -> WindowPreprocessor:
        extractor: Any = from_folder(WhisperFeatureExtractor, folder)
        config: Any = from_folder(GlmAsrConfig, folder)
        check_mels(config.audio_config.num_mel_bins, extractor, folder)
        most = longest_sound(folder, _LONGEST_S)
        return WindowPreprocessor(extractor, _num_rows, min_frames=_MIN_FRAMES, max_s=most)

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        audio = config.audio_config
        attention = Split(
            path="self_attn",
            columns=("q_proj", "k_proj", "v_proj"),
            row="o_proj",
            heads=int(audio.num_attention_heads),
            run=_run_attention,
        )
        return TowerPlan(
            blocks=f"{TOWER}.layers",
            num_blocks=audio.num_hidden_layers,
            in_block=(attention, Split(path="mlp", columns=("fc1",), row="fc2")),
            once=(PROJECTOR_SPLIT,),
        )

    def encode(self, features: Tensor, frames: Tensor, windows: Sequence[int]) -> Tensor:
        hidden: Tensor = self.tower(features).last_hidden_state
        rows: Tensor = self.projector(hidden.reshape(len(hidden), -1, _MERGED * hidden.shape[-1]))
        return rows

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = GlmAsrConfig(
            audio_config={
                "model_type": "glmasr_encoder",
                "num_mel_bins": 16,
                "hidden_size": 48,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "max_position_embeddings": 100,
            },
            text_config={**TINY_QWEN2, "model_type": "llama", "head_dim": 10},
            audio_token_id=60,
        )
        make: Any = WhisperFeatureExtractor
        write_random(cls.model_class, config, make(feature_size=16, chunk_length=2), out, seed)
