"""The samples of a sound, decoded by PyAV piece by piece and given up as soon as they are too many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.audio import too_long
from spmd_encoder.media.av_container import OWN_BYTES, check_decoder, memory_bound, only, opened, reported
from spmd_encoder.media.base import Buffer, Sound
from spmd_encoder.media.facts import Facts
from spmd_encoder.media.resample import Resampler, Samples

DECODERS = (
    *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw"),
    *("flac", "alac", "mp3float", "vorbis", "opus", "aac"),
)
"""FFmpeg's names of what is decoded."""
MIN_RATE, MAX_RATE = 1_000, 768_000
MOST_CHANNELS = 64
"""As many as libswresample takes."""
LOUDEST = 2.0**31
"""Of samples where 1 is full scale: who writes whole numbers of 32 bits as floating-point ones means it. Spectrograms
are of squares, of which float32 cannot hold those of 1e19."""
_PLANES = 8
"""Those that an AVFrame has room for (AV_NUM_DATA_POINTERS)."""
_MOST_SECONDS = 1e6
_SELF_SYNCHRONISING = frozenset({"mp3float"})
"""What lies between the frames of such a stream (tags, remains of a cut) is passed over, as players do."""


def decode(data: Buffer, facts: Facts, rate: int, max_seconds: float) -> Sound:
    """See `media.audio.decode`."""
    result_bytes = int(4 * rate * min(max_seconds, _MOST_SECONDS))
    with (
        reported("sound"),
        memory_bound(OWN_BYTES + 2 * len(data) + 2 * result_bytes),
        opened(data, facts, DECODERS) as container,
    ):
        stream = _track(container)
        pieces = _at_rate(_pieces(container, stream, facts, max_seconds), rate)
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not len(samples):
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "the sound has no samples")
    if not np.isfinite(samples).all():
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "the sound has samples that are not finite numbers")
    if (loudest := max(samples.max(), -samples.min())) > LOUDEST:
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT,
            f"the sound has samples of up to {loudest:.1e}, where 1 is full scale; at most {LOUDEST:.1e} is taken",
        )
    return Sound(samples=samples, rate=rate)


def _track(container: InputContainer) -> AudioStream:
    stream = container.streams.best("audio")
    if stream is None:
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "the item has no sound track")
    check_decoder(stream, DECODERS, "sound")
    only(container, stream)
    stream.codec_context.thread_count = 1
    return cast(AudioStream, stream)


def _at_rate(pieces: Iterator[tuple[int, Samples]], rate: int) -> list[Samples]:
    resampler, done = None, []
    for source, samples in pieces:
        if source == rate:
            done.append(samples)
        else:
            resampler = resampler or Resampler(source, rate)
            done += resampler.push(samples)
    return done + (resampler.finish() if resampler else [])


def _pieces(
    container: InputContainer, stream: AudioStream, facts: Facts, max_seconds: float
) -> Iterator[tuple[int, Samples]]:
    """(rate, samples) of each frame, mono. The rate does not change."""
    rate = count = 0
    for frame in _frames(container, stream, facts):
        if frame.sample_rate != (rate := rate or frame.sample_rate):
            raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "the sound changes its sample rate on its way")
        if not MIN_RATE <= rate <= MAX_RATE:
            raise EncoderError(
                ErrorCode.MEDIA_UNSUPPORTED,
                f"the sound has a sample rate of {rate} Hz; {MIN_RATE} to {MAX_RATE} Hz are decoded",
            )
        count += frame.samples
        if count > max_seconds * rate:
            raise too_long(max_seconds)
        yield rate, mono(frame)
    if count < facts.samples:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, f"the {facts.format} sound ends before its end")


def _frames(container: InputContainer, stream: AudioStream, facts: Facts) -> Iterator[AudioFrame]:
    passes_over = stream.codec_context.name in _SELF_SYNCHRONISING
    # The last packet of a WAV without a size is always one that could have been longer.
    may_be_short = passes_over or facts.format == "WAV"
    for packet in container.demux(stream):
        if packet.is_corrupt and not may_be_short:  # the file ends within it
            raise EncoderError(ErrorCode.MEDIA_CORRUPT, "the sound ends before its end")
        try:
            yield from packet.decode()
        except av.InvalidDataError:
            if not passes_over:
                raise


def mono(frame: AudioFrame) -> Samples:
    """`[n]`: the mean of the channels, from -1 to 1. Exact for one channel of up to 24 bits.

    Raises `EncoderError` MEDIA_UNSUPPORTED above `MOST_CHANNELS`.
    """
    if (num_channels := frame.layout.nb_channels) > MOST_CHANNELS:
        raise EncoderError(
            ErrorCode.MEDIA_UNSUPPORTED, f"the sound has {num_channels} channels, more than {MOST_CHANNELS}"
        )
    if frame.format.is_planar and num_channels >= _PLANES:
        frame = _packed(frame)
    values = frame.to_ndarray()
    channels = values if frame.format.is_planar else values.reshape(frame.samples, -1).T
    samples: Samples = channels[0].astype(np.float32)
    if len(channels) > 1:
        samples = channels.astype(np.float32).mean(axis=0)
    match values.dtype.kind:
        case "u":
            samples -= np.float32(128)
            samples /= np.float32(128)
        case "i":
            samples /= np.float32(2 ** (8 * values.dtype.itemsize - 1))
    return samples


def _packed(frame: AudioFrame) -> AudioFrame:
    """With the channels of each sample side by side.

    PyAV looks for the planes' end by a null pointer, which is not there when they are as many as an AVFrame has room
    for, or more: it would read whatever lies behind.
    """
    converter = AudioResampler(format=frame.format.packed, layout=frame.layout, rate=frame.sample_rate)
    (packed,) = converter.resample(frame)
    return packed
