"""What families of films share: which frames a video processor takes, and its arithmetic.

transformers' video processors need torchvision. Here is what they compute, with torch alone: torchvision's resize of a
uint8 tensor is `torch.nn.functional.interpolate`, and its normalisation is fused with the rescaling as there
(`image_processing_backends.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from spmd_encoder.api.types import ItemOptions
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.film_settings import FilmSettings, SettingError

_NEAREST = "nearest-exact"
_MODES = {0: _NEAREST, 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""By PIL's numbers, which the settings have."""
USUAL_FPS = 2.0
_ALL_FPS = 30.0
MOST_FRAMES = 2**16


class SamplingCost(TypedDict):
    """Fields of a `VideoCost`."""

    fps: float
    min_frames: int
    max_frames: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`fps` frames of each second, `min_frames` to `max_frames`, a multiple of `step`; or `num_frames` of any film; or,
    with neither, all frames up to `max_frames`."""

    fps: float | None
    min_frames: int
    max_frames: int
    step: int = 1
    num_frames: int | None = None

    @classmethod
    def of(cls, settings: FilmSettings, step: int) -> Sampling:
        """Raises SettingError. A number goes before a rate: transformers refuses both together."""
        if settings.get("num_frames") is not None:
            number = settings.whole("num_frames", most=MOST_FRAMES)
            return cls(fps=None, min_frames=1, max_frames=number, step=step, num_frames=number)
        return cls(
            fps=None if settings.get("fps") is None else settings.rate(),
            min_frames=settings.whole("min_frames", least=0, most=MOST_FRAMES),
            max_frames=settings.whole("max_frames"),
            step=step,
        )

    @property
    def usual_fps(self) -> float:
        """Frames per second of films that do not say it."""
        return self.fps or USUAL_FPS

    def wanted(self, info: FilmInfo, options: ItemOptions) -> float:
        """How many frames, before rounding: a request may ask for another rate, and for fewer than `max_frames`."""
        most = min(self.max_frames, options.max_frames or self.max_frames)
        fps = options.fps or self.fps
        if fps is None:
            return min(self.num_frames or max(info.num_frames, self.min_frames), most)
        most = min(most, info.num_frames)
        return min(max(info.num_frames / (info.fps or fps) * fps, min(self.min_frames, most)), most)

    def cost(self) -> SamplingCost:
        """All frames of a film are priced as if they were 30 of each second."""
        if self.num_frames:
            return {"fps": 0.0, "min_frames": self.num_frames, "max_frames": self.num_frames}
        return {"fps": self.fps or _ALL_FPS, "min_frames": self.min_frames, "max_frames": self.max_frames}


def evenly_from_start(sampling: Sampling, info: FilmInfo, options: ItemOptions) -> list[int]:
    """As `Qwen2VLVideoProcessor.sample_frames`: equal steps from the first frame, a multiple of `step` of them."""
    least = min(sampling.step, options.max_frames or sampling.step)
    count = max(least, int(sampling.wanted(info, options)) // sampling.step * sampling.step)
    if count >= info.num_frames:
        return list(range(info.num_frames))
    indices: list[int] = torch.arange(0, info.num_frames, info.num_frames / count).int().tolist()
    return indices[:count]


def evenly_to_end(sampling: Sampling, info: FilmInfo, options: ItemOptions) -> list[int]:
    """As `Qwen3VLVideoProcessor.sample_frames`: from the first frame to the last. More than there are: some twice."""
    count = max(1, int(sampling.wanted(info, options)))
    indices: list[int] = np.linspace(0, info.num_frames - 1, count).round().astype(int).tolist()
    return indices


def frames_refused(width: int, height: int, most: int) -> EncoderError:
    """The error for frames that can be decoded but not encoded, as one side is more than `most` times the other."""
    return EncoderError(
        ErrorCode.MEDIA_CORRUPT,
        f"frames of {width} x {height} pixels cannot be encoded: this model takes a longer side of at most {most} "
        "times the shorter one",
    )


def frames_tensor(film: Film) -> Tensor:
    """`[frames, 3, height, width]` uint8. Raises `EncoderError` MEDIA_CORRUPT where the film has no frame."""
    if not film.frames:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "the film has no frame that could be decoded")
    return torch.from_numpy(np.stack(film.frames)).permute(0, 3, 1, 2)


class FramePixels:
    """A video processor's resizing and normalisation of frames."""

    def __init__(self, settings: FilmSettings) -> None:
        """Raises SettingError for what transformers or torchvision does not take."""
        self.is_resized = settings.flag("do_resize")
        self._mode = _mode(settings) if self.is_resized else ""
        self._factor = settings.number("rescale_factor") if settings.flag("do_rescale") else 1.0
        self._mean: Tensor | None = None
        if settings.flag("do_normalize"):
            scale = 1.0 / self._factor  # fused, as `_fuse_mean_std_and_rescale_factor`
            self._mean = torch.tensor(settings.per_channel("image_mean"))[:, None, None] * scale
            self._std = torch.tensor(settings.per_channel("image_std"))[:, None, None] * scale
            if not self._std.all():
                raise SettingError("image_std has a 0, by which nothing can be divided")

    def resized(self, frames: Tensor, height: int, width: int) -> Tensor:
        """uint8 frames of another size, as torchvision's `resize` with antialiasing makes them of a tensor."""
        if tuple(frames.shape[-2:]) == (height, width):
            return frames
        if self._mode == _NEAREST:
            return torch.nn.functional.interpolate(frames, (height, width), mode=_NEAREST)
        resize = torch.nn.functional.interpolate
        return resize(frames, (height, width), mode=self._mode, antialias=True, align_corners=False)

    def normalised(self, frames: Tensor) -> Tensor:
        """float32 frames."""
        if self._mean is None:
            return frames.float() * self._factor
        return frames.float().sub_(self._mean).div_(self._std)


def _mode(settings: FilmSettings) -> str:
    resample = settings.whole("resample", least=0, most=5)
    if resample not in _MODES:
        raise SettingError(f"resample is {resample}, a filter that torchvision has not for tensors")
    return _MODES[resample]


def centre(frames: Tensor, height: int, width: int) -> Tensor:
    """Their middle, with black around it where they are smaller, as `center_crop` of `image_processing_backends.py`."""
    more_high, more_wide = max(0, height - frames.shape[-2]), max(0, width - frames.shape[-1])
    if more_high or more_wide:
        sides = (more_wide // 2, (more_wide + 1) // 2, more_high // 2, (more_high + 1) // 2)
        frames = torch.nn.functional.pad(frames, sides)
    top, left = (frames.shape[-2] - height) // 2, (frames.shape[-1] - width) // 2
    return frames[..., top : top + height, left : left + width]


def sampled_fps(film: Film, default: float) -> float:
    """Frames per second of what was chosen, as `VideoMetadata.sampled_fps` has it."""
    return len(film.frames) / film.info.num_frames * (film.info.fps or default)


def times_of(indices: Sequence[int], fps: float, step: int) -> list[float]:
    """Seconds of each `step` frames: the mean of the first and the last, as Qwen3-VL's `_calculate_timestamps`."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    seconds = [index / fps for index in padded]
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]
