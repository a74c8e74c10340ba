"""Films: what their header says, and the frames that are chosen of them.

A film is a file (MP4, MOV, WebM, Matroska) or a list of pictures in one byte string (`media.frames`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import image
from spmd_encoder.media.audio import no_decoder
from spmd_encoder.media.base import Buffer, Film, FilmInfo, FilmLimits, Header
from spmd_encoder.media.container import FILM_FORMATS, read_facts
from spmd_encoder.media.film_limits import check_bytes, check_chosen, check_pixels, check_seconds
from spmd_encoder.media.frames import MAX_FILES, Clip, is_packed, unpack
from spmd_encoder.media.pixels import Background

CLIP = "FRAMES"
"""What `Header.format` is for a list of pictures."""


def probe(data: Buffer, max_pixels: int | None = None) -> Header:
    """Read format, size and length from the header; nothing is decoded, and no native parser sees a film.

    The size is upright where a track of an MP4 says so; it is that of the first picture of a list. The length is 0
    where the header does not tell, as of recordings that were never finished. Raises `EncoderError`: MEDIA_UNSUPPORTED,
    MEDIA_CORRUPT, or TOO_LARGE above `max_pixels` of one frame.
    """
    if is_packed(data):
        clip = unpack(data)
        try:
            first = image.probe(clip.files[0], max_pixels)
        except EncoderError as error:
            raise _of_frame(0, error) from None
        return Header(CLIP, first.width, first.height, clip.seconds, len(clip.files))
    facts = read_facts(data, "film", FILM_FORMATS)
    if not facts.width or not facts.height:
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "the item has no track of moving pictures")
    check_pixels(facts.width, facts.height, max_pixels)
    return Header(facts.format, facts.width, facts.height, facts.seconds)


def decode(
    data: Buffer,
    choose: Callable[[FilmInfo], Sequence[int]],
    limits: FilmLimits,
    background: Background = "white",
) -> Film:
    """The frames that `choose` picks, by ascending index, of an ideal film of constant rate.

    That film has `FilmInfo.num_frames` frames, as many as are in the file, and its frame i is what is shown at
    `i / fps`; `Film.times` are the times of what was shown. Equal indices, and those that show the same frame of a film
    with a changing rate, share one array. Frames that cannot be decoded whole are left out, also from `indices`; so a
    film that was cut gives those that are there. Pictures of a list are all wanted: a broken one fails it.
    What is transparent in them is laid on `background`.

    Raises `EncoderError`: MEDIA_UNSUPPORTED, also where PyAV is not installed or there is only sound; TOO_LARGE
    beyond `limits`; MEDIA_CORRUPT where no chosen frame can be decoded, or pictures of a list have several sizes.
    What `choose` raises is passed on; ValueError where its indices do not ascend within the film.
    """
    if is_packed(data):
        return _decode_clip(unpack(data, min(limits.max_walked, MAX_FILES)), choose, limits, background)
    facts = read_facts(data, "film", FILM_FORMATS)
    check_pixels(facts.width, facts.height, limits.max_pixels)
    try:
        from spmd_encoder.media import av_video
    except ImportError:
        raise no_decoder() from None
    return av_video.decode(data, facts, choose, limits)


def _decode_clip(
    clip: Clip, choose: Callable[[FilmInfo], Sequence[int]], limits: FilmLimits, background: Background
) -> Film:
    check_seconds(clip.seconds, limits)
    first = _picture(clip, 0, limits, background)
    height, width, _ = first.shape
    info = FilmInfo(num_frames=len(clip.files), fps=clip.fps, seconds=clip.seconds, width=width, height=height)
    indices = [int(index) for index in choose(info)]
    check_chosen(indices, info, limits)
    check_bytes(len(set(indices)), info, limits)
    pictures = {0: first}
    for index in indices:
        if index in pictures:
            continue
        pictures[index] = _picture(clip, index, limits, background)
        if pictures[index].shape != first.shape:
            other_height, other_width, _ = pictures[index].shape
            raise EncoderError(
                ErrorCode.MEDIA_CORRUPT,
                f"frame {index} has {other_width} x {other_height} pixels and frame 0 {width} x {height}; all frames "
                "of a clip must have one size",
            )
    return Film(
        frames=tuple(pictures[index] for index in indices),
        times=tuple(index / clip.fps for index in indices),
        indices=tuple(indices),
        info=info,
    )


def _picture(clip: Clip, index: int, limits: FilmLimits, background: Background) -> npt.NDArray[np.uint8]:
    try:
        return np.array(image.decode(clip.files[index], limits.max_pixels, background))
    except EncoderError as error:
        raise _of_frame(index, error) from None


def _of_frame(index: int, error: EncoderError) -> EncoderError:
    return EncoderError(error.code, f"frame {index}: {error.message}")
