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
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import Features
from spmd_encoder.models.film_settings import FilmSettings, NoFilms, SettingError
from spmd_encoder.models.picture import MAX_ASPECT_RATIO
from spmd_encoder.models.video import MOST_FRAMES, FramePixels, centre, frames_refused, frames_tensor, sampled_fps

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_SKIPPED = 1
"""Seconds at both ends of long films that SmolVLM's processor leaves out."""
_LONGEST = 4096
"""Pixels of the longer side of what SmolVLM's processor scales a frame to, at most. Towers take some hundred."""
_MOST_AT_RATE = 768
"""Frames of a film where the checkpoint names a rate and no number: the server's default."""
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
    crops: ClassVar[bool] = True
    """Whether the video processor crops frames where it is told so."""

    refusal = None

    def __init__(self, settings: FilmSettings, side: int, patch: int, rows: int) -> None:
        """`rows` per frame, of a tower that takes `side` pixels per side in patches of `patch`. Raises SettingError."""
        self._rows = rows
        self._grid = (side // patch, side // patch)
        self._pixels = FramePixels(settings)
        self.read_sampling(settings)
        self._crop = settings.crop_size() if self.crops else None
        self._size = self.read_size(settings)
        if (made := self.frame_size()) != (side, side):
            raise SettingError(f"they bring frames to {_shown(made)}, but config.json asks for {side} pixels per side")

    @classmethod
    def load(cls, folder: Path, side: int, patch: int, rows: int) -> Self | NoFilms:
        settings = FilmSettings.read(folder, cls.defaults)
        try:
            return cls(settings, side, patch, rows)
        except SettingError as error:
            return settings.refusal(error)

    def read_sampling(self, settings: FilmSettings) -> None:
        """A number goes before a rate: transformers refuses both together."""
        self._fps: float | None = None
        self._most = self.most
        if settings.get("num_frames") is not None:
            self._most = settings.whole("num_frames")
        elif settings.get("fps") is not None:
            self._fps, self._most = settings.rate(), _MOST_AT_RATE

    def read_size(self, settings: FilmSettings) -> dict[str, int]:
        """What frames are resized to; none where they are not resized."""
        if not self._pixels.is_resized:
            return {}
        size = settings.size("size")
        if set(size) not in ({"height", "width"}, {"shortest_edge"}):
            raise SettingError(f"size is {size}, and has neither height and width nor shortest_edge alone")
        return _bounded(size)

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

    def frame_size(self) -> tuple[int, int] | None:
        """(height, width) of what the tower gets; None where frames have different ones."""
        if self._crop is not None:
            return self._crop
        return (self._size["height"], self._size["width"]) if "height" in self._size else None

    def sized(self, frame: Tensor) -> Tensor:
        """One frame, uint8 `[1, 3, height, width]`, as the tower takes it."""
        if self._size:
            frame = self._pixels.resized(frame, *self._between(*frame.shape[-2:]))
        return frame if self._crop is None else centre(frame, *self._crop)

    def _between(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) to which a frame is resized, before it is cropped."""
        if "height" in self._size:
            return self._size["height"], self._size["width"]
        shortest = self._size["shortest_edge"]
        longest = int(shortest * max(height, width) / min(height, width))  # as `get_resize_output_image_size`
        return (shortest, longest) if width >= height else (longest, shortest)

    def features(self, film: Film) -> Features:
        """Raises EncoderError MEDIA_CORRUPT for frames that are far longer than wide, or the reverse."""
        frames = frames_tensor(film)
        count, _, height, width = frames.shape
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise frames_refused(width, height, MAX_ASPECT_RATIO)
        pixels = self._pixels.normalised(torch.cat([self.sized(frame[None]) for frame in frames]))
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

    defaults = MappingProxyType({**COMMON, "size": {"height": 384, "width": 384}, "default_to_square": False})
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
            "default_to_square": False,
        }
    )
    most = 32


class InternFilms(FrameFilms):
    """`InternVLVideoProcessor`."""

    defaults = MappingProxyType({**COMMON, "size": {"height": 384, "width": 384}, "initial_shift": True})
    most = 8

    def read_sampling(self, settings: FilmSettings) -> None:
        super().read_sampling(settings)
        self._shift = settings.get("initial_shift")
        if not isinstance(self._shift, int | float) or not 0 <= self._shift <= MOST_FRAMES:
            raise SettingError(f"initial_shift is {self._shift}, and neither true nor the number of a frame")

    def spread(self, total: int, count: int) -> list[int]:
        """From the middle of the first of `count` equal parts, or from `initial_shift` on, where the film is longer."""
        first = total / count / 2 if self._shift is True else self._shift
        if first >= total:  # refused by transformers
            first = 0
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

    crops = False

    def __init__(self, settings: FilmSettings, side: int, patch: int, rows: int) -> None:
        settings.crop_size()  # has no effect, but transformers refuses all films where it is missing
        super().__init__(self._known(settings), side, patch, rows)

    def _known(self, settings: FilmSettings) -> FilmSettings:
        """`video_sampling` goes before all but `size`."""
        if "video_sampling" not in settings.values:
            return settings.but(size=settings.values.get("size", {"longest_edge": 4 * 364}))
        said = settings.get("video_sampling")
        if not isinstance(said, dict) or not {"fps", "max_frames", "video_size"} <= said.keys():
            raise SettingError(f"video_sampling is {said}, without fps, max_frames and video_size")
        return settings.but(
            fps=said["fps"], num_frames=said["max_frames"], size=settings.values.get("size", said["video_size"])
        )

    def read_sampling(self, settings: FilmSettings) -> None:
        self._fps = 1.0 if settings.get("fps") is None else settings.rate()
        self._most = self.most if settings.get("num_frames") is None else settings.whole("num_frames")

    def read_size(self, settings: FilmSettings) -> dict[str, int]:
        if not self._pixels.is_resized:
            raise SettingError("do_resize is off, and the tower takes frames of one size")
        largest = settings.get("max_image_size")
        if not isinstance(largest, dict):
            raise SettingError(f"max_image_size is {largest}, and has no longest_edge")
        self._tile = FilmSettings(largest).whole("longest_edge")
        size = settings.size("size")
        if "longest_edge" not in size and set(size) != {"height", "width"}:
            raise SettingError(f"size is {size}, and has neither longest_edge nor height and width")
        return size if "longest_edge" in size else _bounded(size)

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
        return self._tile, self._tile

    def sized(self, frame: Tensor) -> Tensor:
        return self._pixels.resized(super().sized(frame), *self.frame_size())

    def _between(self, height: int, width: int) -> tuple[int, int]:
        if "longest_edge" not in self._size:
            return self._size["height"], self._size["width"]
        longest = min(_LONGEST, self._size["longest_edge"])
        ratio = width / height
        if width >= height:
            high = int(longest / ratio)
            return max(1, high + high % 2), longest
        wide = int(longest * ratio)
        return longest, max(1, wide + wide % 2)


def _bounded(size: dict[str, int]) -> dict[str, int]:
    """Raises SettingError for what would take all memory, before it is cropped."""
    if max(size.values()) > _LONGEST:
        raise SettingError(f"size is {size}, and at most {_LONGEST} pixels per side can be served")
    return size


def _shown(size: tuple[int, int] | None) -> str:
    return "different sizes" if size is None else f"(height, width) {size}"
