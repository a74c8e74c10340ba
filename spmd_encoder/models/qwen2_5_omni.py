"""Qwen2.5-Omni's thinker: the vision tower of Qwen2.5-VL, and an audio tower with one row per 40 ms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.api.cost import AudioCost
from spmd_encoder.api.types import Modality
from spmd_encoder.media.base import Sound
from spmd_encoder.models.attention import SegmentAttention, rotate_in_float32_
from spmd_encoder.models.audio import check_length, chunk_plan, extract
from spmd_encoder.models.base import Features
from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.omni import AUDIO_TOWER, OmniAdapter, OmniFilms, OmniSounds, save_extractor
from spmd_encoder.models.qwen_vl import TOWER, run_attention
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random

_MIN_FRAMES = 3
"""Of the extractor: with fewer no row would come out."""


def _num_rows(frames: int) -> int:
    """After both convolutions and the pooling (`_get_feat_extract_output_lengths` of the tower)."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


class Qwen25OmniSounds(OmniSounds):
    """`input_features` `[mel bins, frames]` of the sound alone, and `feature_lens` `[1]`."""

    def cost(self) -> AudioCost:
        return AudioCost(tokens_per_s=self.sampling_rate / self.hop / 2, max_s=float(self.extractor.chunk_length))

    def features(self, sound: Sound) -> Features:
        extractor, hop = self.extractor, self.hop
        check_length(sound, extractor.chunk_length, min_samples=(_MIN_FRAMES - 1) * hop + 1)
        # transformers pads to `n_samples`, five minutes, and takes the padding off again. Of it the sound's own frames
        # see no more than half a window.
        enough = math.ceil((len(sound.samples) + extractor.n_fft) / hop) * hop
        made = extract(extractor, sound, padding="max_length", max_length=min(enough, extractor.n_samples))
        frames = int(made["attention_mask"].sum())
        return Features(
            tensors={
                "input_features": made["input_features"][0, :, :frames].contiguous(),
                "feature_lens": torch.tensor([frames]),
            },
            num_tokens=_num_rows(frames),
            cost=(frames - 1) // 2 + 1,
            modality=Modality.AUDIO,
            details={"audio_feature_length": frames},
        )


class Qwen25OmniFilms(OmniFilms):
    longest_edge = 768 * 28 * 28


class VisionAttention(SegmentAttention):
    """Takes the place of transformers' own after it was cut."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention, closing="proj", columns=("q", "k", "v"))

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """`[rows, width]` to the same; the rest as in `models.attention.PackedAttention`."""
        return self.attend(hidden_states[None], cu_seqlens, position_embeddings)[0]

    def _rotated(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        qkv = super()._rotated(hidden)
        rotate_in_float32_(qkv, *positions)
        return qkv


ATTENTION = Split(
    path="attn", columns=("q", "k", "v"), row="proj", heads="num_heads", run=run_attention, faster=VisionAttention
)


class Qwen25OmniAdapter(OmniAdapter):
    """`tokens` are `get_image_features`, `get_video_features` and `get_audio_features` of the thinker.

    Talker and token2wav, which make speech, are not read.
    """

    model_types = ("qwen2_5_omni", "qwen2_5_omni_thinker")
    family = "qwen2_5_omni"
    model_class = Qwen2_5OmniThinkerForConditionalGeneration
    config_class = Qwen2_5OmniThinkerConfig
    films = Qwen25OmniFilms
    sounds = Qwen25OmniSounds

    @classmethod
    def plan(cls, vision: Any) -> TowerPlan:
        return TowerPlan(
            blocks=f"{TOWER}.blocks",
            num_blocks=vision.depth,
            in_block=(ATTENTION, feed_forward("gate_proj", "up_proj", row="down_proj", activation="act_fn")),
            once=(Split(path=f"{TOWER}.merger.mlp", columns=("0",), row="2"),),
        )

    @classmethod
    def audio_plan(cls, audio: Any) -> TowerPlan:
        return chunk_plan(f"{AUDIO_TOWER}.layers", audio.encoder_layers)

    @classmethod
    def width(cls, vision: Any) -> int:
        return int(vision.out_hidden_size)

    def pack_sounds(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`input_features` `[mel bins, all frames]` float32, `feature_lens` `[items]` int64."""
        return {
            "input_features": torch.cat([item.tensors["input_features"] for item in items], dim=1),
            "feature_lens": torch.cat([item.tensors["feature_lens"] for item in items]),
        }

    def sound_rows(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        tower: Any = self._model.get_submodule(AUDIO_TOWER)
        rows: Tensor = tower(batch["input_features"], feature_lens=batch["feature_lens"]).last_hidden_state
        return torch.split(rows, [_num_rows(frames) for frames in batch["feature_lens"].tolist()])

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        thinker = {
            "vision_config": {
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 100,  # not divisible by 3, as the real 3420 is not by 8
                "num_heads": 4,
                "out_hidden_size": 96,
                "fullatt_block_indexes": [1, 3],
            },
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 6,
                "encoder_ffn_dim": 100,
                "d_model": 48,
                "max_source_positions": 100,
                "n_window": 20,
                "output_dim": 96,
            },
            "text_config": TINY_TEXT,
            "audio_token_index": 59,
            "image_token_index": 60,
            "video_token_index": 61,
            "audio_start_token_id": 57,
            "audio_end_token_id": 58,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
            "user_token_id": 3,
        }
        config = Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
        write_random(Qwen2_5OmniForConditionalGeneration, config, Qwen2VLImageProcessorPil(), out, seed)
        make: Any = WhisperFeatureExtractor
        save_extractor(make(feature_size=16, chunk_length=2, return_attention_mask=True), out)


TINY_TEXT = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4]},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The language half of a tiny configuration."""
