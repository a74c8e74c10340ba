"""What families of films share: their video processor's settings, which frames it takes, and its arithmetic.

transformers' video processors need torchvision. Here is what they compute, with torch alone: torchvision's resize of a
uint8 tensor is `torch.nn.functional.interpolate`, and its normalisation is fused with the rescaling as there
(`image_processing_backends.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_encoder.api.types import ItemOptions
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import Film, FilmInfo

_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3  # PIL's numbers, which the settings have
_MODES = {_LANCZOS: "lanczos", _BILINEAR: "bilinear", _BICUBIC: "bicubic"}


def read_video_settings(folder: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's settings over `defaults`, from the file that transformers would take them from.

    Those for pictures stand in where there are none for films, also (unlike there) in the file of all processors.
    Raises StartupError where that is no JSON object.
    """
    for name, key in (
        ("processor_config.json", "video_processor"),
        ("video_preprocessor_config.json", None),
        ("preprocessor_config.json", None),
        ("processor_config.json", "image_processor"),
    ):
        if not (folder / name).is_file():
            continue
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8"))
            found = said.get(key) if key else said
        except (ValueError, AttributeError):
            raise StartupError(f"{folder / name} is not a JSON object") from None
        if found is not None:
            return {**defaults, **{k: v for k, v in found.items() if v is not None}}
    return dict(defaults)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`fps` frames of each second, `min_frames` to `max_frames`, a multiple of `step`."""

    fps: float
    min_frames: int
    max_frames: int
    step: int = 1

    @classmethod
    def of(cls, settings: Mapping[str, Any], step: int) -> Sampling:
        return cls(
            fps=float(settings["fps"]),
            min_frames=int(settings["min_frames"]),
            max_frames=int(settings["max_frames"]),
            step=step,
        )

    def wanted(self, info: FilmInfo, options: ItemOptions) -> float:
        """How many frames, before rounding: a request may ask for another rate, and for fewer than `max_frames`."""
        most = min(self.max_frames, options.max_frames or self.max_frames, info.num_frames)
        fps = options.fps or self.fps
        return min(max(info.num_frames / (info.fps or fps) * fps, min(self.min_frames, most)), most)


def evenly_from_start(sampling: Sampling, info: FilmInfo, options: ItemOptions) -> list[int]:
    """As `Qwen2VLVideoProcessor.sample_frames`: equal steps from the first frame, a multiple of `step` of them."""
    least = min(sampling.step, options.max_frames or sampling.step)
    count = max(least, int(sampling.wanted(info, options)) // sampling.step * sampling.step)
    if count >= info.num_frames:
        return list(range(info.num_frames))
    indices: list[int] = torch.arange(0, info.num_frames, info.num_frames / count).int().tolist()
    return indices[:count]


def evenly_to_end(sampling: Sampling, info: FilmInfo, options: ItemOptions) -> list[int]:
    """As `Qwen3VLVideoProcessor.sample_frames`: from the first frame to the last."""
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


def resized(frames: Tensor, height: int, width: int, resample: int) -> Tensor:
    """uint8 frames of another size, as torchvision's `resize` with antialiasing makes them of a tensor."""
    if tuple(frames.shape[-2:]) == (height, width):
        return frames
    mode = _MODES.get(resample, "bicubic")
    return torch.nn.functional.interpolate(frames, (height, width), mode=mode, antialias=True, align_corners=False)


def normalised(frames: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """float32 frames, rescaled and normalised as the settings say."""
    factor = float(settings.get("rescale_factor", 1 / 255))
    scale = 1.0 / factor if settings.get("do_rescale", True) else 1.0
    if not settings.get("do_normalize", True):
        return frames.float() / scale
    mean = torch.tensor(settings["image_mean"]) * scale
    std = torch.tensor(settings["image_std"]) * scale
    return frames.float().sub_(mean[:, None, None]).div_(std[:, None, None])


def sampled_fps(film: Film, default: float) -> float:
    """Frames per second of what was chosen, as `VideoMetadata.sampled_fps` has it."""
    return len(film.frames) / film.info.num_frames * (film.info.fps or default)


def times_of(indices: Sequence[int], fps: float, step: int) -> list[float]:
    """Seconds of each `step` frames: the mean of the first and the last, as Qwen3-VL's `_calculate_timestamps`."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    seconds = [index / fps for index in padded]
    return [(seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step)]
