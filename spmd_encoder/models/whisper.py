"""Whisper's encoder: one row per 20 ms of a window of 30 s."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.whisper.configuration_whisper import WhisperConfig
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperModel

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import check_length, check_mels, check_window, extract, whisper_plan
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor, TowerOutput
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes


class WhisperPreprocessor(Preprocessor):
    """`input_features` `[1, mel bins, frames]` of a whole window, padded with silence."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor
        self.sampling_rate = extractor.sampling_rate
        self._rows = extractor.nb_max_frames // 2

    def cost_table(self) -> CostTable:
        window_s = float(self.extractor.chunk_length)
        return CostTable(audio=AudioCost(tokens_per_s=self._rows / window_s, min_s=window_s, max_s=window_s))

    def preprocess_audio(self, sound: Sound) -> Features:
        check_length(sound, self.extractor.chunk_length)
        made = extract(self.extractor, sound)
        return Features(
            tensors={"input_features": made["input_features"]},
            num_tokens=self._rows,
            cost=self._rows,
            modality=Modality.AUDIO,
        )


class WhisperAdapter(FamilyAdapter):
    """`tokens` `[window / 2, d_model]` is the encoder's `last_hidden_state`, silence included, as the decoder takes it.

    Longer sounds than a window are refused: a decoder takes one window at a time, and knows where to cut.
    """

    model_types = ("whisper",)
    family = "whisper"
    modalities = (Modality.AUDIO,)

    def __init__(self, model: PreTrainedModel, preprocessor: WhisperPreprocessor, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        self.embedding_dims = {OutputKind.TOKENS: int(model.config.d_model)}
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> WhisperPreprocessor:
        return WhisperPreprocessor(from_folder(WhisperFeatureExtractor, folder))

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> WhisperAdapter:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(WhisperConfig, folder)
        check_mels(config.num_mel_bins, preprocessor.extractor, folder)
        check_window(config.max_source_positions, preprocessor.extractor, folder)
        plan = whisper_plan("encoder.layers", config.encoder_layers)
        model = load_tower(WhisperModel, config, folder, "encoder", plan, context)
        return cls(model, preprocessor, context.device)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`input_features` `[items, mel bins, frames]` float32."""
        return {"input_features": torch.cat([item.tensors["input_features"] for item in items])}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        encoder: Any = self._model.get_submodule("encoder")
        features = batch["input_features"].to(self._device, self._model.dtype)
        return TowerOutput.of_batch(encoder(features).last_hidden_state, None)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = WhisperConfig(
            vocab_size=64,
            num_mel_bins=16,
            d_model=48,
            encoder_layers=2,
            encoder_attention_heads=6,
            encoder_ffn_dim=100,
            decoder_layers=1,
            decoder_attention_heads=2,
            decoder_ffn_dim=64,
            max_source_positions=100,
            max_target_positions=32,
            pad_token_id=1,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )
        extractor: Any = WhisperFeatureExtractor
        write_random(WhisperModel, config, extractor(feature_size=16, chunk_length=2), out, seed)
