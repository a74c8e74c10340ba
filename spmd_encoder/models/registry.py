"""Which family serves which checkpoint. Plain data, no torch: the keeper and the nursery read it too."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from types import MappingProxyType

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.models import families
from spmd_encoder.models.audio_families import AUDIO_FAMILIES
from spmd_encoder.models.fallback_types import modeling_modules
from spmd_encoder.models.families import NOT_SERVED as NOT_SERVED
from spmd_encoder.models.families import FamilyEntry as FamilyEntry
from spmd_encoder.models.lean_imports import deferred_compiler, without_training
from spmd_encoder.models.retrieval_families import RETRIEVAL_FAMILIES

FAMILIES: tuple[FamilyEntry, ...] = (*families.FAMILIES, *AUDIO_FAMILIES, *RETRIEVAL_FAMILIES)
FALLBACK = FamilyEntry(
    family="fallback",
    model_types=(),
    adapter="spmd_encoder.models.fallback:FallbackAdapter",
    preload=(
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.image_processing_auto",
        "transformers.models.auto.feature_extraction_auto",
        "transformers.models.auto.processing_auto",
        "transformers.models.auto.video_processing_auto",
    ),
)
"""What `find` gives for a type without a family, of which transformers may know enough."""

_COMMON_PRELOAD = (
    "torch",
    "torch.distributed",
    "safetensors.torch",
    "torch.utils._device",
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.modeling_utils",
    # transformers and PIL import these four at the first call of a model or a processor, not with the module.
    "transformers.models.auto.configuration_auto",
    "transformers.integrations.sdpa_attention",
    "transformers.image_transforms",
    "PIL.ImageFile",
    "spmd_encoder.models.loading",
)
_DECODERS = MappingProxyType(
    {
        Modality.IMAGE: "spmd_encoder.media.image",
        Modality.AUDIO: "spmd_encoder.media.av_audio",
        Modality.VIDEO: "spmd_encoder.media.av_video",
    }
)


def supported_model_types() -> tuple[str, ...]:
    """All model types that can be served, sorted."""
    return tuple(sorted(t for entry in FAMILIES for t in entry.model_types))


def find(model_type: str) -> FamilyEntry:
    """The family that answers to `model_type` (a checkpoint's `config.json` names it), or the fallback's entry for it.

    Raises StartupError that names the type and lists what is supported.
    """
    for entry in FAMILIES:
        if model_type in entry.model_types:
            return entry
    why = dict(NOT_SERVED).get(model_type)
    if why is None:
        if modules := modeling_modules(model_type):
            return replace(FALLBACK, model_types=(model_type,), preload=(*FALLBACK.preload, *modules))
        why = "transformers has no model of this type with get_image_features, get_audio_features or get_video_features"
    raise StartupError(
        f"model type {model_type!r} is not supported here ({why}); supported are: {', '.join(supported_model_types())}"
    )


def preload(model_type: str) -> None:
    """Import everything that loading a checkpoint of this type would import, and start nothing.

    Called in the process that workers are forked from, so that a fork has nothing left to import or to prepare.
    Raises StartupError for an unsupported type.
    """
    entry = find(model_type)
    with deferred_compiler():
        with without_training():
            for module in _COMMON_PRELOAD:
                importlib.import_module(module)
        for module in (*entry.preload, entry.adapter.partition(":")[0]):
            importlib.import_module(module)
    module, _, name = entry.adapter.partition(":")
    for modality in getattr(importlib.import_module(module), name).modalities:
        with contextlib.suppress(ImportError):  # PyAV is optional; without it each item of the kind is refused
            importlib.import_module(_DECODERS[modality])
    importlib.import_module("spmd_encoder.models.weights").warm_up()
