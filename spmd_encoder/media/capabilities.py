"""Which sounds and films this installation decodes."""

from __future__ import annotations

from spmd_encoder.media.container import FILM_FORMATS, SOUND_FORMATS


def capabilities() -> dict[str, tuple[str, ...]]:
    """Formats and codecs of sounds and films; empty where PyAV is not installed.

    Loads FFmpeg's libraries (a tenth of a second, some 25 MB) but has them read nothing.
    """
    try:
        from spmd_encoder.media import av_audio, av_container, av_video
    except ImportError:
        return {"audio_formats": (), "audio_codecs": (), "video_formats": (), "video_codecs": ()}
    audio, video = (av_container.available(names) for names in (av_audio.DECODERS, av_video.DECODERS))
    return {
        "audio_formats": SOUND_FORMATS,
        "audio_codecs": audio,
        "video_formats": FILM_FORMATS,
        "video_codecs": video,
    }
