"""The families whose sounds are all or half of what they take, beside those of `models.families`. Plain data."""

from __future__ import annotations

from spmd_encoder.models.families import FamilyEntry

_WHISPER_FEATURES = "transformers.models.whisper.feature_extraction_whisper"
_OMNI_KEYS = ("visual.", "audio_tower.")

AUDIO_FAMILIES: tuple[FamilyEntry, ...] = (
    FamilyEntry(
        family="qwen2_5_omni",
        model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
        adapter="spmd_encoder.models.qwen2_5_omni:Qwen25OmniAdapter",
        preload=(
            "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
            "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
            _WHISPER_FEATURES,
        ),
        tower_keys=(
            *(f"thinker.{key}" for key in _OMNI_KEYS),
            *(f"thinker.model.{key}" for key in _OMNI_KEYS),
            *_OMNI_KEYS,
            *(f"model.{key}" for key in _OMNI_KEYS),
        ),
    ),
)
