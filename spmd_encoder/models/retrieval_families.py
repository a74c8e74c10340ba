"""The families that give many vectors per picture, to be searched by. All weights are the encoder's. Plain data."""

from __future__ import annotations

from spmd_encoder.models.families import FamilyEntry

_TOKENS = ("tokenizers", "transformers.models.auto.tokenization_auto", "transformers.tokenization_utils_tokenizers")

RETRIEVAL_FAMILIES: tuple[FamilyEntry, ...] = (
    FamilyEntry(
        family="colpali",
        model_types=("colpali",),
        adapter="spmd_encoder.models.colpali:ColPaliAdapter",
        preload=(
            "transformers.models.colpali.modeling_colpali",
            "transformers.models.colpali.processing_colpali",
            "transformers.models.paligemma.modeling_paligemma",
            "transformers.models.gemma.modeling_gemma",
            "transformers.models.siglip.modeling_siglip",
            "transformers.models.siglip.image_processing_pil_siglip",
            *_TOKENS,
        ),
    ),
    FamilyEntry(
        family="colqwen2",
        model_types=("colqwen2",),
        adapter="spmd_encoder.models.colqwen2:ColQwen2Adapter",
        preload=(
            "transformers.models.colqwen2.modeling_colqwen2",
            "transformers.models.colqwen2.processing_colqwen2",
            "transformers.models.qwen2_vl.modeling_qwen2_vl",
            "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
            *_TOKENS,
        ),
    ),
    FamilyEntry(
        family="colmodernvbert",
        model_types=("colmodernvbert",),
        adapter="spmd_encoder.models.colmodernvbert:ColModernVBertAdapter",
        preload=(
            "transformers.models.colmodernvbert.modeling_colmodernvbert",
            "transformers.models.colmodernvbert.processing_colmodernvbert",
            "transformers.models.modernvbert.modeling_modernvbert",
            "transformers.models.modernbert.modeling_modernbert",
            "transformers.models.siglip.modeling_siglip",
            "transformers.models.idefics3.image_processing_pil_idefics3",
            *_TOKENS,
        ),
    ),
)
