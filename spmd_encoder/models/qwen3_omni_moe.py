"""Qwen3-Omni's thinker: the vision tower of Qwen3-VL with its levels, and an audio tower with 13 rows per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeThinkerConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.api.cost import AudioCost
from spmd_encoder.api.types import Modality
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import LONGEST_S, check_length, chunk_plan, extract
from spmd_encoder.models.audio_chunks import chunk_lengths, chunk_tensors, encode_chunks, pack_chunks, positions
from spmd_encoder.models.base import Features
from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.omni import AUDIO_TOWER, OmniAdapter, OmniFilms, OmniSounds, save_extractor
from spmd_encoder.models.qwen3_vl import rows_with_levels
from spmd_encoder.models.qwen_vl import ATTENTION, TOWER
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random


class Qwen3OmniSounds(OmniSounds):
    """Chunks as `models.audio_chunks` has them. A sound of any length is taken whole."""

    def cost(self) -> AudioCost:
        chunk_s = self.chunk * self.hop / self.sampling_rate
        return AudioCost(tokens_per_s=positions(self.chunk) / chunk_s, max_s=LONGEST_S)

    def features(self, sound: Sound) -> Features:
        # The spectrogram mirrors half a window at the ends.
        check_length(sound, float("inf"), min_samples=max(self.hop, self.extractor.n_fft // 2 + 1))
        made = extract(self.extractor, sound, padding=True, truncation=False)
        frames = int(made["attention_mask"].sum())
        rows = sum(positions(length) for length in chunk_lengths(frames, self.chunk))
        return Features(
            tensors=chunk_tensors(made["input_features"][0], frames, self.chunk, min(frames, self.chunk)),
            num_tokens=rows,
            cost=rows,
            modality=Modality.AUDIO,
            details={"audio_feature_length": frames},
        )


class Qwen3OmniFilms(OmniFilms):
    longest_edge = 768 * 32 * 32


def _run_merger(merger: nn.Module, hidden: Tensor) -> Tensor:
    """Both kinds of merger: the last one's norm is over patches, those of the levels are over merged patches."""
    norm = merger.get_submodule("ln_q")
    assert isinstance(norm, nn.LayerNorm)
    out: Tensor = merger(hidden.reshape(-1, norm.normalized_shape[0]))
    return out


def _merger(path: str) -> Split:
    return Split(path=f"{TOWER}.{path}", columns=("mlp.0",), row="mlp.2", run=_run_merger)


class Qwen3OmniMoeAdapter(OmniAdapter):
    """`tokens` of pictures and films as Qwen3-VL's, with the levels behind each row; those of sounds
    `[rows, output_dim]`, which have no levels, are `get_audio_features` of the thinker.

    Talker and code2wav, which make speech, are not read.
    """

    model_types = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
    family = "qwen3_omni_moe"
    model_class = Qwen3OmniMoeThinkerForConditionalGeneration
    config_class = Qwen3OmniMoeThinkerConfig
    films = Qwen3OmniFilms
    sounds = Qwen3OmniSounds

    @classmethod
    def plan(cls, vision: Any) -> TowerPlan:
        levels = range(len(vision.deepstack_visual_indexes))
        return TowerPlan(
            blocks=f"{TOWER}.blocks",
            num_blocks=vision.depth,
            in_block=(ATTENTION, feed_forward("linear_fc1", row="linear_fc2", activation="act_fn")),
            once=(_merger("merger"), *(_merger(f"merger_list.{level}") for level in levels)),
        )

    @classmethod
    def audio_plan(cls, audio: Any) -> TowerPlan:
        return chunk_plan(f"{AUDIO_TOWER}.layers", audio.encoder_layers)

    @classmethod
    def width(cls, vision: Any) -> int:
        return int(vision.out_hidden_size) * (1 + len(vision.deepstack_visual_indexes))

    def rows(self, out: Any) -> Sequence[Tensor]:
        return rows_with_levels(out)

    def pack_sounds(self, items: Sequence[Features]) -> dict[str, Tensor]:
        return pack_chunks(items)

    def sound_rows(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        tower: Any = self._model.get_submodule(AUDIO_TOWER)
        hidden, counts = encode_chunks(tower, batch)
        return torch.split(tower.proj2(tower.act(tower.proj1(hidden))), counts)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        thinker = {
            "vision_config": {
                "depth": 4,
                "hidden_size": 64,
                "intermediate_size": 100,
                "num_heads": 4,
                "out_hidden_size": 48,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [1, 2],
            },
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 6,
                "encoder_ffn_dim": 100,
                "d_model": 48,
                "max_source_positions": 100,
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "output_dim": 48,
            },
            "text_config": {
                "vocab_size": 64,
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]},
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "audio_token_id": 59,
            "image_token_id": 60,
            "video_token_id": 61,
            "audio_start_token_id": 57,
            "audio_end_token_id": 58,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
            "user_token_id": 3,
        }
        config = Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
        # As the real ones have it, with fewer pixels.
        pictures = Qwen2VLImageProcessorPil(
            patch_size=16,
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
            size={"shortest_edge": 64 * 64, "longest_edge": 12845056},
        )
        write_random(Qwen3OmniMoeForConditionalGeneration, config, pictures, out, seed)
        make: Any = WhisperFeatureExtractor
        save_extractor(make(feature_size=16, chunk_length=2, return_attention_mask=True), out)
