"""Which module reads which modality. To add one: write `media/<modality>.py` and its line here."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import cast

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import MediaKind

KINDS = MappingProxyType(
    {
        Modality.IMAGE: "spmd_encoder.media.image",
    }
)


def media_kind(modality: Modality) -> MediaKind:
    """The reader of `modality`. Raises `EncoderError` MEDIA_UNSUPPORTED where there is none."""
    if (path := KINDS.get(modality)) is None:
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, f"{modality} is not read by this version")
    return cast(MediaKind, importlib.import_module(path))
