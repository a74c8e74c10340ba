"""Films for families that encode each frame as a picture of one size: which frames, and their pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from spmd_encoder.api.cost import VideoCost
from spmd_encoder.api.types import Detail, ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import Features
from spmd_encoder.models.picture import MAX_ASPECT_RATIO
from spmd_encoder.models.video import (
    frames_refused,
    frames_tensor,
    normalised,
    read_video_settings,
    resized,
    sampled_fps,
)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_SKIPPED = 1
"""Seconds at both ends of long films that SmolVLM's processor leaves out."""
_LONGEST = 4096
"""Pixels of the longer side of what it scales a frame to, at most."""
COMMON: Mapping[str, Any] = MappingProxyType({"resample": 3, "image_mean": CLIP_MEAN, "image_std": CLIP_STD})


class FrameFilms:
    """`pixel_values` `[frames, 3, side, side]` float32, equal to `pixel_values_videos` of the video processor.

    Most checkpoints do not say how many frames they take, and transformers then takes all: here `most` is the default.
    """

    defaults: ClassVar[Mapping[str, Any]]
    most: ClassVar[int]
    """Frames of a film, unless the checkpoint says otherwise: what the family was trained or shown with."""
    closing_rows: ClassVar[int] = 0
    """Rows behind those of all frames."""

    def __init__(self, settings: Mapping[str, Any], side: int, patch: int, rows: int) -> None:
        """`rows` per frame, of a tower that takes pictures of `side` pixels in patches of `patch`."""
        self._settings = settings
        self._rows = rows
        self._grid = (side // patch, side // patch)
        self._num_frames = settings.get("num_frames")
        self._fps = None if self._num_frames else settings.get("fps")
        self._most = int(self._num_frames or self.most)
        self._side = side

    @classmethod
    def load(cls, folder: Path, side: int, patch: int, rows: int) -> Self:
        return cls(read_video_settings(folder, cls.defaults), side, patch, rows)

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        """A film with fewer frames than are wanted, which transformers refuses, is taken as a whole."""
        count = min(self._wanted(info, options), options.max_frames or self._most, self._most, info.num_frames)
        return self.spread(info.num_frames, max(1, count))

    def _wanted(self, info: FilmInfo, options: ItemOptions) -> int:
        fps = options.fps or self._fps
        return int(info.num_frames / (info.fps or fps) * fps) if fps else self._most

    def spread(self, total: int, count: int) -> list[int]:
        """As `default_sample_indices_fn` of `video_utils.py`: equal steps from the first frame."""
        indices: list[int] = (np.arange(count, dtype=int) * total // count).tolist()
        return indices

    def frame_size(self) -> tuple[int, int]:
        """(height, width) of what the tower gets."""
        if self._settings.get("do_center_crop"):
            crop = self._settings["crop_size"]
            return (crop, crop) if isinstance(crop, int) else (int(crop["height"]), int(crop["width"]))
        size = self._settings["size"]
        if isinstance(size, int) or "height" not in size:
            return (0, 0)
        return int(size["height"]), int(size["width"])

    def sized(self, frame: Tensor) -> Tensor:
        """One frame, uint8 `[1, 3, height, width]`, as the tower takes it."""
        size, (high, wide) = self._settings["size"], self.frame_size()
        shortest = size if isinstance(size, int) else size.get("shortest_edge")
        if not shortest:
            return resized(frame, int(size["height"]), int(size["width"]), self._resample)
        height, width = frame.shape[-2:]
        short, long = min(height, width), max(height, width)
        long = int(shortest * long / short)  # as `get_resize_output_image_size` of `image_transforms.py`
        tall, broad = (shortest, long) if width >= height else (long, shortest)
        frame = resized(frame, tall, broad, self._resample)
        top, left = (frame.shape[-2] - high) // 2, (frame.shape[-1] - wide) // 2
        return frame[..., top : top + high, left : left + wide]

    @property
    def misfit(self) -> str | None:
        """Where the checkpoint's settings bring frames to a size that its tower does not take: both sizes, in words.
        Its pictures are served all the same."""
        if (made := self.frame_size()) == (self._side, self._side):
            return None
        return (
            f"this checkpoint's video processor makes frames of (height, width) {made}, "
            f"but its config.json asks for {self._side} pixels per side"
        )

    @property
    def _resample(self) -> int:
        return int(self._settings["resample"])

    def features(self, film: Film) -> Features:
        """Raises EncoderError: MEDIA_CORRUPT for frames that are far longer than wide, or the reverse, and
        MEDIA_UNSUPPORTED where there is a `misfit`."""
        if self.misfit is not None:
            raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, self.misfit)
        frames = frames_tensor(film)
        count, _, height, width = frames.shape
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise frames_refused(width, height, MAX_ASPECT_RATIO)
        pixels = normalised(torch.cat([self.sized(frame[None]) for frame in frames]), self._settings)
        return Features(
            tensors={"pixel_values": pixels},
            num_tokens=count * self._rows + self.closing_rows,
            cost=count * self._grid[0] * self._grid[1],
            grid=(count, *self._grid),
            modality=Modality.VIDEO,
            details={"num_frames": count, **self.details(film)},
        )

    def details(self, film: Film) -> dict[str, Detail]:
        """What the language model may want to know of the chosen frames."""
        fps = film.info.fps or 1.0
        return {
            "sampled_fps": sampled_fps(film, fps),
            "timestamps": [index / fps for index in film.indices],
            "duration": film.info.seconds,
        }

    def cost(self) -> VideoCost:
        return VideoCost(
            fps=self._fps or 0.0,
            min_frames=1 if self._fps else self._most,
            max_frames=self._most,
            tokens_per_step=self._grid[0] * self._grid[1],
        )


class OnevisionFilms(FrameFilms):
    """`LlavaOnevisionVideoProcessor`."""

    defaults = MappingProxyType({**COMMON, "size": {"height": 384, "width": 384}})
    most = 32
    closing_rows = 1


class NextVideoFilms(FrameFilms):
    """`LlavaNextVideoVideoProcessor`."""

    defaults = MappingProxyType(
        {
            **COMMON,
            "size": {"shortest_edge": 224},
            "crop_size": {"height": 224, "width": 224},
            "do_center_crop": True,
        }
    )
    most = 32


class InternFilms(FrameFilms):
    """`InternVLVideoProcessor`."""

    defaults = MappingProxyType({**COMMON, "size": {"height": 384, "width": 384}, "initial_shift": True})
    most = 8

    def spread(self, total: int, count: int) -> list[int]:
        """From the middle of the first of `count` equal parts, or from `initial_shift` on."""
        shift = self._settings["initial_shift"]
        first = total / count / 2 if shift is True else shift
        indices: list[int] = torch.arange(first, total, total / count).int().tolist()
        return indices[:count]


class SmolFilms(FrameFilms):
    """`SmolVLMVideoProcessor`: the frame scaled to its longer side, then to the square of a tile."""

    defaults = MappingProxyType(
        {
            "resample": 1,
            "max_image_size": {"longest_edge": 364},
            "image_mean": (0.5, 0.5, 0.5),
            "image_std": (0.5, 0.5, 0.5),
            "fps": 1,
        }
    )
    most = 64

    def __init__(self, settings: Mapping[str, Any], side: int, patch: int, rows: int) -> None:
        sampling = settings.get("video_sampling", {})
        size = settings.get("size") or sampling.get("video_size") or {"longest_edge": 4 * 364}
        said = {"num_frames": None, "fps": sampling.get("fps", settings["fps"]), "size": size}
        super().__init__({**settings, **said}, side, patch, rows)
        self._most = int(sampling.get("max_frames") or settings.get("num_frames") or self.most)

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        fps, most = options.fps or self._fps or 1.0, min(options.max_frames or self._most, self._most)
        count = min(max(1, min(round(fps * info.seconds), most)), info.num_frames)
        start, end = 0, info.num_frames - 1
        if info.seconds - 2 * _SKIPPED > most * fps:
            start = int(_SKIPPED * info.fps)
            end = min(int(info.num_frames - _SKIPPED * info.fps), end)
        if start >= end:
            start, end = 0, info.num_frames - 1
        indices: list[int] = np.unique(np.linspace(start, end, count, dtype=int)).tolist()
        return indices

    def frame_size(self) -> tuple[int, int]:
        side = int(self._settings["max_image_size"]["longest_edge"])
        return side, side

    def sized(self, frame: Tensor) -> Tensor:
        longest = min(_LONGEST, int(self._settings["size"]["longest_edge"]))
        height, width = frame.shape[-2:]
        ratio = width / height
        if width >= height:
            high = int(longest / ratio)
            between = max(1, high + high % 2), longest
        else:
            wide = int(longest * ratio)
            between = longest, max(1, wide + wide % 2)
        return resized(resized(frame, *between, self._resample), *self.frame_size(), self._resample)
