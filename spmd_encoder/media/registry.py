"""Which module reads which modality. To add one: write `media/<modality>.py` and its line here."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import cast

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Buffer, MediaKind

_PICTURE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"hevc", b"mif1", b"msf1")
_AUDIO_BRANDS = (b"M4A ", b"M4B ", b"F4A ")
_VIDEO_PREFIXES = (b"\x1aE\xdf\xa3",)
_AUDIO_PREFIXES = (b"fLaC", b"OggS", b"ID3")
KINDS = MappingProxyType(
    {
        Modality.IMAGE: "spmd_encoder.media.image",
        Modality.AUDIO: "spmd_encoder.media.audio",
        Modality.VIDEO: "spmd_encoder.media.video",
    }
)


def guess_modality(data: Buffer) -> Modality:
    """What a file of undeclared type is by its first bytes; a picture where they say nothing, whose reader then says
    what is wrong."""
    head = bytes(data[:16])
    if head[4:8] == b"ftyp" and head[8:12] not in _PICTURE_BRANDS:
        return Modality.AUDIO if head[8:12] in _AUDIO_BRANDS else Modality.VIDEO
    if head.startswith(_VIDEO_PREFIXES):
        return Modality.VIDEO
    is_wave = head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"
    # The frames of an MP3 without a tag begin with eleven ones and a layer that is not 0.
    is_mpeg = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 != 0
    return Modality.AUDIO if is_wave or is_mpeg or head.startswith(_AUDIO_PREFIXES) else Modality.IMAGE


def media_kind(modality: Modality) -> MediaKind:
    """The reader of `modality`. Raises `EncoderError` MEDIA_UNSUPPORTED where there is none."""
    if (path := KINDS.get(modality)) is None:
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, f"{modality} is not read by this version")
    return cast(MediaKind, importlib.import_module(path))
