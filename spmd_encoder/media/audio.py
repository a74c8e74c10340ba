"""Sounds: what their header says, and their samples, mono at one rate."""

from __future__ import annotations

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Buffer, Header, Sound
from spmd_encoder.media.container import SOUND_FORMATS, read_facts


def probe(data: Buffer, max_seconds: float | None = None) -> Header:
    """Read format and length from the header; nothing is decoded, and no native parser sees the file.

    The length is 0 where the header does not tell: AAC (ADTS), and recordings in WebM or MP4 that were never finished.
    It is an estimate for an MP3 without a count of its frames. Raises `EncoderError`: MEDIA_UNSUPPORTED,
    MEDIA_CORRUPT, or TOO_LARGE above `max_seconds`.
    """
    facts = read_facts(data, "sound", SOUND_FORMATS)
    if max_seconds is not None and facts.seconds > max_seconds:
        raise too_long(max_seconds)
    return Header(facts.format, seconds=facts.seconds)


def decode(data: Buffer, rate: int, max_seconds: float) -> Sound:
    """The whole sound, mixed down to mono (the mean of its channels) at `rate` Hz.

    Of a film (MP4, MOV, WebM, Matroska) it is the sound track, and pictures of a cover are passed over. Samples of the
    same rate are passed on exactly (16-bit ones over 32768); others are resampled to `ceil(n * rate / its rate)` of
    them (`media.resample`). Floating-point and lossy files may go beyond -1 to 1.

    Raises `EncoderError`: MEDIA_UNSUPPORTED, also where PyAV is not installed or the film has no sound; TOO_LARGE as
    soon as more than `max_seconds` are decoded; MEDIA_CORRUPT for what is damaged, holds no sample, or numbers that are
    not finite or far beyond full scale, and for a file that ends before its end, where that shows: by the size of its
    chunk (WAV), the number of samples (FLAC), the frame or byte count if there is one (MP3), the mark of the last page
    (Ogg), the sizes of its boxes or elements (MP4, Matroska; a recording without them only where a block is cut), or a
    cut frame (AAC).
    """
    facts = read_facts(data, "sound", SOUND_FORMATS)
    if not facts.complete:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, f"the {facts.format} sound ends before its end")
    try:
        from spmd_encoder.media import av_audio
    except ImportError:
        raise no_decoder() from None
    return av_audio.decode(data, facts, rate, max_seconds)


def too_long(max_seconds: float) -> EncoderError:
    return EncoderError(
        ErrorCode.TOO_LARGE, f"the sound lasts longer than the limit of {max_seconds:g} s (--max-audio-seconds)"
    )


def no_decoder() -> EncoderError:
    return EncoderError(
        ErrorCode.MEDIA_UNSUPPORTED,
        "audio and video are not decoded by this server: audio/video need `pip install spmd-encoder[media]`",
    )
