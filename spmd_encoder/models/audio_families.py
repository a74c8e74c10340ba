"""The families whose sounds are all or half of what they take, beside those of `models.families`. Plain data."""

from __future__ import annotations

from spmd_encoder.models.families import FamilyEntry

_WHISPER_FEATURES = "transformers.models.whisper.feature_extraction_whisper"
_TOWER_AND_PROJECTOR = (
    *("audio_tower.", "multi_modal_projector."),
    *("model.audio_tower.", "model.multi_modal_projector."),
)
_LANGUAGE = ("transformers.models.llama.modeling_llama", "transformers.models.qwen2.configuration_qwen2")
"""The stand-in for language models, see `models.vision_language`, and the configuration of one that it replaces."""
_FLAMINGO = (
    "transformers.models.audioflamingo3.modeling_audioflamingo3",
    "transformers.models.musicflamingo.modeling_musicflamingo",
    _WHISPER_FEATURES,
    *_LANGUAGE,
)
_THINKER_KEYS = tuple(
    f"{prefix}{tower}."
    for prefix in ("thinker.", "thinker.model.", "", "model.")
    for tower in ("visual", "audio_tower")
)

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
        tower_keys=_THINKER_KEYS,
    ),
    FamilyEntry(
        family="qwen3_omni_moe",
        model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        adapter="spmd_encoder.models.qwen3_omni_moe:Qwen3OmniMoeAdapter",
        preload=(
            "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
            "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
            _WHISPER_FEATURES,
        ),
        tower_keys=_THINKER_KEYS,
    ),
    FamilyEntry(
        family="qwen3_asr",
        model_types=("qwen3_asr",),
        adapter="spmd_encoder.models.qwen3_asr:Qwen3AsrAdapter",
        preload=(
            "transformers.models.qwen3_asr.modeling_qwen3_asr",
            "transformers.models.qwen3_asr.feature_extraction_qwen3_asr",
            "transformers.models.qwen3.configuration_qwen3",
            *_LANGUAGE,
        ),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="clap",
        model_types=("clap",),
        adapter="spmd_encoder.models.clap:ClapAdapter",
        preload=(
            "transformers.models.clap.modeling_clap",
            "transformers.models.clap.feature_extraction_clap",
            "numpy.fft",
        ),
        tower_keys=("audio_model.", "audio_projection."),
    ),
    FamilyEntry(
        family="voxtral",
        model_types=("voxtral",),
        adapter="spmd_encoder.models.voxtral:VoxtralAdapter",
        preload=("transformers.models.voxtral.modeling_voxtral", _WHISPER_FEATURES, *_LANGUAGE),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="audioflamingo3",
        model_types=("audioflamingo3",),
        adapter="spmd_encoder.models.audioflamingo3:AudioFlamingo3Adapter",
        preload=_FLAMINGO,
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="musicflamingo",
        model_types=("musicflamingo",),
        adapter="spmd_encoder.models.audioflamingo3:MusicFlamingoAdapter",
        preload=_FLAMINGO,
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="glmasr",
        model_types=("glmasr",),
        adapter="spmd_encoder.models.glmasr:GlmAsrAdapter",
        preload=("transformers.models.glmasr.modeling_glmasr", _WHISPER_FEATURES, *_LANGUAGE),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
)
