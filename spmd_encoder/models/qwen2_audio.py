"""Qwen2-Audio's encoder and projector: one row per placeholder token of the language model, 40 ms each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioForConditionalGeneration
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import check_length, check_mels, extract, key_mask, whisper_plan
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor, TowerOutput
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes

TOWER, PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
_MIN_FRAMES = 3
"""Of the extractor: with fewer no row would come out."""


def _encoder_length(frames: int) -> int:
    """Positions of the encoder: after both convolutions (`Qwen2AudioEncoder._get_feat_extract_output_lengths`)."""
    return (frames - 1) // 2 + 1


def _num_rows(frames: int) -> int:
    return (_encoder_length(frames) - 2) // 2 + 1


class Qwen2AudioPreprocessor(Preprocessor):
    """`input_features` `[1, mel bins, frames]` of a window of 30 s, and `feature_length` `[1]`, frames of sound."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor
        self.sampling_rate = extractor.sampling_rate

    def cost_table(self) -> CostTable:
        window_s = float(self.extractor.chunk_length)
        rows = self.extractor.nb_max_frames // 2
        return CostTable(audio=AudioCost(tokens_per_s=rows / window_s, min_s=window_s, max_s=window_s))

    def preprocess_audio(self, sound: Sound) -> Features:
        extractor = self.extractor
        check_length(sound, extractor.chunk_length, min_samples=(_MIN_FRAMES - 1) * extractor.hop_length + 1)
        made = extract(extractor, sound, padding="max_length")
        frames = int(made["attention_mask"].sum())
        return Features(
            tensors={"input_features": made["input_features"], "feature_length": torch.tensor([frames])},
            num_tokens=_num_rows(frames),
            cost=extractor.nb_max_frames // 2,
            modality=Modality.AUDIO,
            details={"audio_feature_length": frames},
        )


class Qwen2AudioAdapter(FamilyAdapter):
    """`tokens` `[rows, width of the language model]`, what the whole model puts in the place of `<|AUDIO|>`."""

    model_types = ("qwen2_audio",)
    family = "qwen2_audio"
    modalities = (Modality.AUDIO,)

    def __init__(self, model: PreTrainedModel, preprocessor: Qwen2AudioPreprocessor, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        text: Any = model.config.text_config
        self.embedding_dims = {OutputKind.TOKENS: int(text.hidden_size)}
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> Qwen2AudioPreprocessor:
        return Qwen2AudioPreprocessor(from_folder(WhisperFeatureExtractor, folder))

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Qwen2AudioAdapter:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(Qwen2AudioConfig, folder)
        audio = config.audio_config
        check_mels(audio.num_mel_bins, preprocessor.extractor, folder)
        plan = whisper_plan(f"{TOWER}.layers", audio.encoder_layers)
        model = load_tower(Qwen2AudioForConditionalGeneration, config, folder, (TOWER, PROJECTOR), plan, context)
        return cls(model, preprocessor, context.device)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`input_features` `[items, mel bins, frames]` float32, `feature_length` `[items]` int64."""
        return {
            name: torch.cat([item.tensors[name] for item in items]) for name in ("input_features", "feature_length")
        }

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        tower: Any = self._model.get_submodule(TOWER)
        features = batch["input_features"].to(self._device)
        frames = batch["feature_length"].to(self._device)
        mask = key_mask((frames - 1) // 2 + 1, features.shape[-1] // 2)
        hidden = tower(features, attention_mask=mask).last_hidden_state
        rows = self._model.get_submodule(PROJECTOR)(hidden)
        counts = [_num_rows(count) for count in frames.tolist()]
        return TowerOutput.of_batch([row[:count] for row, count in zip(rows, counts, strict=True)], None)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = Qwen2AudioConfig(
            audio_config={
                "num_mel_bins": 16,
                "d_model": 48,
                "encoder_layers": 2,
                "encoder_attention_heads": 6,
                "encoder_ffn_dim": 100,
                "max_source_positions": 100,
            },
            text_config={
                "model_type": "qwen2",
                "vocab_size": 64,
                "hidden_size": 40,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
            audio_token_index=60,
        )
        make: Any = WhisperFeatureExtractor
        extractor = make(feature_size=16, chunk_length=2, return_attention_mask=True)
        write_random(Qwen2AudioForConditionalGeneration, config, extractor, out, seed)
