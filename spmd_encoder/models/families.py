"""The families and what each needs: plain data, a line or two where one is added. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Qwen2.5-VL's tower, those that stand on SigLIP so400m, and Qwen2's language model have activations beyond 65504.
_OVERFLOW_IN_FLOAT16 = frozenset(
    {
        *("qwen2_5_vl", "qwen2_5_omni", "siglip", "siglip2", "llava_onevision", "gemma3", "paligemma"),
        *("idefics3", "smolvlm", "colpali", "colqwen2"),
    }
)


@dataclass(frozen=True, kw_only=True)
class FamilyEntry:
    """One family. `adapter` is `module:Class`; `preload` are the modules that its first load would import.

    `tower_keys` are the prefixes that the tower's weights have in checkpoints on the hub (old and new names);
    a hub download takes only the shards that hold one. Empty means that all weights are the tower's.
    """

    family: str
    model_types: tuple[str, ...]
    adapter: str
    preload: tuple[str, ...]
    tower_keys: tuple[str, ...] = ()

    @property
    def float16_safe(self) -> bool:
        """Whether no checkpoint of the family is known whose tower overflows in float16."""
        return self.family not in _OVERFLOW_IN_FLOAT16


_CLIP = ("transformers.models.clip.modeling_clip", "transformers.models.clip.image_processing_pil_clip")
_SIGLIP = ("transformers.models.siglip.modeling_siglip", "transformers.models.siglip.image_processing_pil_siglip")
_PIXTRAL = ("transformers.models.pixtral.modeling_pixtral", "transformers.models.pixtral.image_processing_pil_pixtral")
_GLM = (
    "transformers.models.glm4v.modeling_glm4v",
    "transformers.models.glm4v.image_processing_pil_glm4v",
    "transformers.models.glm4v_moe.modeling_glm4v_moe",
    "transformers.models.glm46v.modeling_glm46v",
    "transformers.models.glm46v.image_processing_pil_glm46v",
)
_LANGUAGE = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.configuration_mistral",
    "transformers.models.qwen2.configuration_qwen2",
    "transformers.models.qwen3.configuration_qwen3",
)
"""The stand-in for language models, see `models.vision_language`, and configurations of those it mostly replaces."""
_IDEFICS = (
    "transformers.models.idefics3.modeling_idefics3",
    "transformers.models.idefics3.image_processing_pil_idefics3",
    "transformers.models.smolvlm.modeling_smolvlm",
    "transformers.models.smolvlm.image_processing_pil_smolvlm",
    *_LANGUAGE,
)
_MINICPM = (
    "transformers.models.minicpmv4_6.modeling_minicpmv4_6",
    "transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6",
    "transformers.models.minicpmv4_7.modeling_minicpmv4_7",
    "transformers.models.qwen3_5.configuration_qwen3_5",
    "torch._subclasses.schema_check_mode",
    *_LANGUAGE,
)
_TOWER_AND_PROJECTOR = (
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
)
_WITH_NEWLINE = (*_TOWER_AND_PROJECTOR, "image_newline", "model.image_newline")
_VISUAL = ("visual.", "model.visual.")
_QWEN_PICTURES = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"

FAMILIES: tuple[FamilyEntry, ...] = (
    FamilyEntry(
        family="qwen2_5_vl",
        model_types=("qwen2_5_vl",),
        adapter="spmd_encoder.models.qwen2_5_vl:Qwen25VLAdapter",
        preload=("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", _QWEN_PICTURES),
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="qwen2_vl",
        model_types=("qwen2_vl",),
        adapter="spmd_encoder.models.qwen2_vl:Qwen2VLAdapter",
        preload=("transformers.models.qwen2_vl.modeling_qwen2_vl", _QWEN_PICTURES),
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="qwen3_vl",
        model_types=("qwen3_vl",),
        adapter="spmd_encoder.models.qwen3_vl:Qwen3VLAdapter",
        preload=("transformers.models.qwen3_vl.modeling_qwen3_vl", _QWEN_PICTURES),
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="qwen3_vl_moe",
        model_types=("qwen3_vl_moe",),
        adapter="spmd_encoder.models.qwen3_vl_moe:Qwen3VLMoeAdapter",
        preload=("transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe", _QWEN_PICTURES),
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="qwen3_5",
        model_types=("qwen3_5",),
        adapter="spmd_encoder.models.qwen3_5:Qwen35Adapter",
        preload=("transformers.models.qwen3_5.modeling_qwen3_5", _QWEN_PICTURES),
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="qwen3_5_moe",
        model_types=("qwen3_5_moe",),
        adapter="spmd_encoder.models.qwen3_5:Qwen35MoeAdapter",
        preload=("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", _QWEN_PICTURES),
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="glm4v",
        model_types=("glm4v",),
        adapter="spmd_encoder.models.glm4v:Glm4vAdapter",
        preload=_GLM,
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="glm4v_moe",
        model_types=("glm4v_moe",),
        adapter="spmd_encoder.models.glm4v:Glm4vMoeAdapter",
        preload=_GLM,
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="glm46v",
        model_types=("glm46v",),
        adapter="spmd_encoder.models.glm4v:Glm46VAdapter",
        preload=_GLM,
        tower_keys=_VISUAL,
    ),
    FamilyEntry(
        family="llava",
        model_types=("llava",),
        adapter="spmd_encoder.models.llava:LlavaAdapter",
        preload=(
            *_CLIP,
            *_SIGLIP,
            *_PIXTRAL,
            "transformers.models.llava.modeling_llava",
            "transformers.models.llava.image_processing_pil_llava",
            *_LANGUAGE,
        ),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="llava_next",
        model_types=("llava_next",),
        adapter="spmd_encoder.models.llava_next:LlavaNextAdapter",
        preload=(
            *_CLIP,
            *_SIGLIP,
            "transformers.models.llava_next.modeling_llava_next",
            "transformers.models.llava_next.image_processing_pil_llava_next",
            *_LANGUAGE,
        ),
        tower_keys=_WITH_NEWLINE,
    ),
    FamilyEntry(
        family="llava_next_video",
        model_types=("llava_next_video",),
        adapter="spmd_encoder.models.llava_next_video:LlavaNextVideoAdapter",
        preload=(
            *_CLIP,
            *_SIGLIP,
            "transformers.models.llava_next_video.modeling_llava_next_video",
            "transformers.models.llava_next.image_processing_pil_llava_next",
            *_LANGUAGE,
        ),
        tower_keys=(*_WITH_NEWLINE, "vision_resampler.", "model.vision_resampler."),
    ),
    FamilyEntry(
        family="llava_onevision",
        model_types=("llava_onevision",),
        adapter="spmd_encoder.models.llava_onevision:LlavaOnevisionAdapter",
        preload=(
            *_CLIP,
            *_SIGLIP,
            "transformers.models.llava_onevision.modeling_llava_onevision",
            "transformers.models.llava_onevision.image_processing_pil_llava_onevision",
            *_LANGUAGE,
        ),
        tower_keys=_WITH_NEWLINE,
    ),
    FamilyEntry(
        family="internvl",
        model_types=("internvl",),
        adapter="spmd_encoder.models.internvl:InternVLAdapter",
        preload=(
            "transformers.models.internvl.modeling_internvl",
            "transformers.models.got_ocr2.image_processing_pil_got_ocr2",
            *_LANGUAGE,
        ),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="mistral3",
        model_types=("mistral3",),
        adapter="spmd_encoder.models.mistral3:Mistral3Adapter",
        preload=(
            *_PIXTRAL,
            "transformers.models.mistral3.modeling_mistral3",
            "transformers.models.ministral3.configuration_ministral3",
            *_LANGUAGE,
        ),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="gemma3",
        model_types=("gemma3",),
        adapter="spmd_encoder.models.gemma3:Gemma3Adapter",
        preload=(
            *_SIGLIP,
            "transformers.models.gemma3.modeling_gemma3",
            "transformers.models.gemma3.image_processing_pil_gemma3",
            *_LANGUAGE,
        ),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="paligemma",
        model_types=("paligemma",),
        adapter="spmd_encoder.models.paligemma:PaliGemmaAdapter",
        preload=(
            *_SIGLIP,
            "transformers.models.paligemma.modeling_paligemma",
            "transformers.models.gemma.configuration_gemma",
            "transformers.models.gemma2.configuration_gemma2",
            *_LANGUAGE,
        ),
        tower_keys=_TOWER_AND_PROJECTOR,
    ),
    FamilyEntry(
        family="idefics3",
        model_types=("idefics3",),
        adapter="spmd_encoder.models.idefics3:Idefics3Adapter",
        preload=_IDEFICS,
        tower_keys=("model.vision_model.", "model.connector."),
    ),
    FamilyEntry(
        family="smolvlm",
        model_types=("smolvlm",),
        adapter="spmd_encoder.models.idefics3:SmolVLMAdapter",
        preload=_IDEFICS,
        tower_keys=("model.vision_model.", "model.connector."),
    ),
    FamilyEntry(
        family="minicpmv4_6",
        model_types=("minicpmv4_6",),
        adapter="spmd_encoder.models.minicpmv:MiniCPMV46Adapter",
        preload=_MINICPM,
        tower_keys=("model.vision_tower.", "model.merger."),
    ),
    FamilyEntry(
        family="minicpmv4_7",
        model_types=("minicpmv4_7",),
        adapter="spmd_encoder.models.minicpmv:MiniCPMV47Adapter",
        preload=_MINICPM,
        tower_keys=("model.vision_tower.", "model.merger."),
    ),
    FamilyEntry(
        family="clip",
        model_types=("clip", "clip_vision_model"),
        adapter="spmd_encoder.models.clip:ClipAdapter",
        preload=_CLIP,
        tower_keys=("vision_model.", "visual_projection."),
    ),
    FamilyEntry(
        family="siglip",
        model_types=("siglip", "siglip_vision_model"),
        adapter="spmd_encoder.models.siglip:SiglipAdapter",
        preload=_SIGLIP,
        tower_keys=("vision_model.",),
    ),
    FamilyEntry(
        family="siglip2",
        model_types=("siglip2", "siglip2_vision_model"),
        adapter="spmd_encoder.models.siglip2:Siglip2Adapter",
        preload=(
            "transformers.models.siglip2.modeling_siglip2",
            "transformers.models.siglip2.image_processing_pil_siglip2",
        ),
        tower_keys=("vision_model.",),
    ),
    FamilyEntry(
        family="whisper",
        model_types=("whisper",),
        adapter="spmd_encoder.models.whisper:WhisperAdapter",
        preload=(
            "transformers.models.whisper.modeling_whisper",
            "transformers.models.whisper.feature_extraction_whisper",
        ),
        tower_keys=("encoder.", "model.encoder."),
    ),
    FamilyEntry(
        family="qwen2_audio",
        model_types=("qwen2_audio",),
        adapter="spmd_encoder.models.qwen2_audio:Qwen2AudioAdapter",
        preload=(
            "transformers.models.qwen2_audio.modeling_qwen2_audio",
            "transformers.models.qwen2.modeling_qwen2",
            "transformers.models.whisper.feature_extraction_whisper",
        ),
        tower_keys=(
            *("audio_tower.", "multi_modal_projector."),
            *("model.audio_tower.", "model.multi_modal_projector."),
        ),
    ),
    FamilyEntry(
        family="dinov2",
        model_types=("dinov2",),
        adapter="spmd_encoder.models.dinov2:Dinov2Adapter",
        preload=(
            "transformers.models.dinov2.modeling_dinov2",
            "transformers.models.bit.image_processing_pil_bit",
        ),
    ),
    FamilyEntry(
        family="dinov2_with_registers",
        model_types=("dinov2_with_registers",),
        adapter="spmd_encoder.models.dinov2_with_registers:Dinov2WithRegistersAdapter",
        preload=(
            "transformers.models.dinov2.modeling_dinov2",
            "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers",
            "transformers.models.bit.image_processing_pil_bit",
        ),
    ),
    FamilyEntry(
        family="dinov3_vit",
        model_types=("dinov3_vit",),
        adapter="spmd_encoder.models.dinov3_vit:DINOv3ViTAdapter",
        preload=("transformers.models.dinov3_vit.modeling_dinov3_vit",),
    ),
    FamilyEntry(
        family="dinov3_convnext",
        model_types=("dinov3_convnext",),
        adapter="spmd_encoder.models.dinov3_convnext:DINOv3ConvNextAdapter",
        preload=("transformers.models.dinov3_convnext.modeling_dinov3_convnext",),
    ),
)

NOT_SERVED: tuple[tuple[str, str], ...] = (
    ("llama4", "transformers has its image processor for torchvision only"),
    ("kimi_k25", "transformers has its image processor for torchvision only"),
    ("minicpm_ocr", "transformers has its image processor for torchvision only"),
    ("gemma3n", "transformers has its picture tower by way of timm, which needs torchvision"),
    ("granite_speech", "transformers has its feature extractor for torchaudio only"),
    ("instructblipvideo", "a film's rows depend on the prompt, which its Q-Former reads, too"),
    ("phi4_multimodal", "a sound's rows depend on whether the prompt has pictures, too"),
    ("voxtral_realtime", "it hears a sound step by step with the language model, and has no rows of a finished one"),
    ("ultravox", "transformers has no such model, and code of a checkpoint is not run"),
    ("kimi_vl", "transformers has no such model, and code of a checkpoint is not run"),
    ("minicpmv", "transformers has MiniCPM-V from 4.6 on, and code of a checkpoint is not run"),
    ("internvl_chat", "transformers has InternVL in its own format only: take the checkpoint whose name ends in -hf"),
)
"""Model types that are asked for and cannot be served, each with the reason."""
