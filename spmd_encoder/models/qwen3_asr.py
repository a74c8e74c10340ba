"""Qwen3-ASR: 13 rows per second of sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_asr.configuration_qwen3_asr import Qwen3ASRConfig
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASRForConditionalGeneration

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import LONGEST_S, check_length, check_mels, chunk_plan, extract
from spmd_encoder.models.audio_chunks import chunk_lengths, chunk_tensors, encode_chunks, positions
from spmd_encoder.models.audio_language import PROJECTOR_SPLIT, TINY_QWEN2, TOWER, AudioLanguageAdapter
from spmd_encoder.models.base import Features, Preprocessor, TowerOutput
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder


class Qwen3AsrPreprocessor(Preprocessor):
    """Chunks as `models.audio_chunks` has them. A sound of any length is taken whole, a short one is half a second."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor
        self.sampling_rate = int(extractor.sampling_rate)
        self._chunk = 2 * int(extractor.n_window)

    def cost_table(self) -> CostTable:
        chunk_s = self._chunk * self.extractor.hop_length / self.sampling_rate
        least = self.extractor.min_length / self.sampling_rate
        return CostTable(audio=AudioCost(tokens_per_s=positions(self._chunk) / chunk_s, min_s=least, max_s=LONGEST_S))

    def preprocess_audio(self, sound: Sound) -> Features:
        # The spectrogram mirrors half a window at the ends.
        extractor = self.extractor
        least = 1 if extractor.min_length else max(extractor.hop_length, extractor.n_fft // 2 + 1)
        check_length(sound, float("inf"), min_samples=least)
        made = extract(extractor, sound, padding=True, truncation=False)
        frames = int(made["attention_mask"].sum())
        rows = sum(positions(length) for length in chunk_lengths(frames, self._chunk))
        return Features(
            tensors=chunk_tensors(made["input_features"][0], frames, self._chunk, self._chunk),
            num_tokens=rows,
            cost=rows,
            modality=Modality.AUDIO,
            details={"audio_feature_length": frames},
        )


class Qwen3AsrAdapter(AudioLanguageAdapter):
    """`tokens` are `get_audio_features` of the whole model."""

    model_types = ("qwen3_asr",)
    family = "qwen3_asr"
    model_class = Qwen3ASRForConditionalGeneration
    config_class = Qwen3ASRConfig

    @classmethod
    def load_preprocessor(cls, folder: Path) -> Qwen3AsrPreprocessor:
        extractor: Any = from_folder(Qwen3ASRFeatureExtractor, folder)
        config: Any = from_folder(Qwen3ASRConfig, folder)
        check_mels(config.audio_config.num_mel_bins, extractor, folder)
        if extractor.n_window != config.audio_config.n_window:
            raise StartupError(
                f"{folder}: preprocessor_config.json makes chunks of {2 * extractor.n_window} frames, but config.json "
                f"asks for {2 * config.audio_config.n_window}"
            )
        return Qwen3AsrPreprocessor(extractor)

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        return chunk_plan(f"{TOWER}.layers", config.audio_config.encoder_layers, once=(PROJECTOR_SPLIT,))

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        inputs = {name: tensor.to(self._device) for name, tensor in batch.items()}
        hidden, counts = encode_chunks(self.tower, inputs)
        return TowerOutput.of_batch(torch.split(self.projector(hidden), counts), None)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Qwen3ASRConfig(
            audio_config={
                "model_type": "qwen3_asr_encoder",
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 6,
                "encoder_ffn_dim": 100,
                "d_model": 48,
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "output_dim": 40,
            },
            text_config={**TINY_QWEN2, "model_type": "qwen3", "head_dim": 10},
            audio_token_id=60,
            timestamp_token_id=61,
            pad_token_id=0,
            eos_token_id=2,
        )
        make: Any = Qwen3ASRFeatureExtractor
        write_random(cls.model_class, config, make(feature_size=16), out, seed)
