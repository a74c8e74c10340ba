"""What a film may cost: refusals that name the limit and its flag."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import FilmInfo, FilmLimits


def check_pixels(width: int, height: int, max_pixels: int | None) -> None:
    if max_pixels is not None and width * height > max_pixels:
        raise _too_large(
            f"the film's frames have {width} x {height} = {width * height} pixels, more than the limit of {max_pixels} "
            "(--max-image-pixels)"
        )


def check_seconds(seconds: float, limits: FilmLimits) -> None:
    if seconds > limits.max_seconds:
        raise film_too_long(limits)


def check_chosen(indices: Sequence[int], info: FilmInfo, limits: FilmLimits) -> None:
    """Raises ValueError, too, where the indices are not of this film or not in order: a fault of who chose them."""
    if list(indices) != sorted(indices) or not indices or indices[0] < 0 or indices[-1] >= info.num_frames:
        raise ValueError(f"the {len(indices)} chosen indices do not ascend within {info.num_frames} frames")
    if len(indices) > limits.max_chosen:
        raise _too_large(
            f"{len(indices)} of the film's frames would be encoded, more than the limit of {limits.max_chosen} "
            "(--max-video-frames); sample fewer"
        )


def check_bytes(num_frames: int, info: FilmInfo, limits: FilmLimits) -> None:
    if (num_bytes := num_frames * info.width * info.height * 3) > limits.max_bytes:
        raise _too_large(
            f"{num_frames} frames of {info.width} x {info.height} pixels take {num_bytes} bytes, more than the limit "
            f"of {limits.max_bytes} (--max-video-bytes-decoded); sample fewer, or send a smaller film"
        )


def check_walked(num_frames: int, limits: FilmLimits) -> None:
    if num_frames > limits.max_walked:
        raise _too_large(
            f"{num_frames} of the film's frames would have to be decoded to get at the chosen ones, more than the "
            f"limit of {limits.max_walked} (--max-video-frames-decoded); sample fewer, or save it with more key frames"
        )


def film_too_long(limits: FilmLimits) -> EncoderError:
    return _too_large(f"the film lasts longer than the limit of {limits.max_seconds:g} s (--max-video-seconds)")


def too_many_packets(most: int) -> EncoderError:
    return _too_large(f"the film has more than {most} frames")


def _too_large(message: str) -> EncoderError:
    return EncoderError(ErrorCode.TOO_LARGE, message)
