"""What this installation decodes, and with what."""

from __future__ import annotations

from collections.abc import Iterable

import PIL

from spmd_encoder.api.types import Modality
from spmd_encoder.media.container import FILM_FORMATS, SOUND_FORMATS
from spmd_encoder.media.image import FORMATS
from spmd_encoder.media.installed import INSTALL, pyav

_BY_PYAV = (Modality.AUDIO, Modality.VIDEO)


def decoders(modalities: Iterable[Modality] = tuple(Modality)) -> dict[str, str | list[str]]:
    """For people: versions of the libraries, then formats and codecs of `modalities`; none of the latter without PyAV.

    Where sounds or films are asked for this loads FFmpeg's libraries (a tenth of a second, some 25 MB), which read
    nothing.
    """
    wanted = [modality for modality in Modality if modality in set(modalities)]
    told: dict[str, str | list[str]] = {
        "pillow": PIL.__version__,
        "pyav": pyav(),
        "torchvision": "not used, whether it is installed or not",
    }
    for modality in wanted:
        formats, codecs = _of(modality)
        told[f"{modality}_formats"] = [*formats]
        if modality in _BY_PYAV:
            told[f"{modality}_codecs"] = [*codecs]
    return told


def without_decoder(modalities: Iterable[Modality]) -> dict[Modality, str]:
    """Those of `modalities` whose files are not decoded here, each with what to do."""
    why = f"PyAV is not installed, or cannot be loaded: {INSTALL}"
    return {modality: why for modality in modalities if not any(_of(modality))}


def _of(modality: Modality) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Formats and codecs; none where PyAV is wanted and cannot be loaded."""
    if modality is Modality.IMAGE:
        return FORMATS, ()
    try:
        from spmd_encoder.media import av_audio, av_container, av_video
    except ImportError:
        return (), ()
    if modality is Modality.AUDIO:
        return SOUND_FORMATS, av_container.available(av_audio.DECODERS)
    return FILM_FORMATS, av_container.available(av_video.DECODERS)
