"""Films for the Qwen-VL families: `temporal_patch_size` frames become one layer of patches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from spmd_encoder.api.cost import VideoCost
from spmd_encoder.api.types import Detail, ItemOptions, Modality
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import Features
from spmd_encoder.models.film_settings import FilmSettings, NoFilms, SettingError
from spmd_encoder.models.picture import MAX_ASPECT_RATIO
from spmd_encoder.models.video import (
    USUAL_FPS,
    FramePixels,
    Sampling,
    evenly_from_start,
    evenly_to_end,
    frames_refused,
    frames_tensor,
    sampled_fps,
    times_of,
)

Patches = tuple[int, int, int]
"""The sizes of a patch, of a square of merged ones, both along a side, and of a layer in frames."""

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "resample": 3,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "fps": USUAL_FPS,
        "min_frames": 4,
        "max_frames": 768,
        # transformers leaves it off for a while yet, and its own warning says to turn it on: without it a film of six
        # minutes in 720p takes 8 GB of patches. The models' own package (qwen-vl-utils) has always bounded films so.
        "cap_pixels_per_frame": True,
    }
)


class QwenFilms(ABC):
    """`pixel_values` `[t * h * w, patch values]` float32 with `image_grid_thw`, equal to the family's video processor.

    The names are those of pictures: the tower takes both alike.
    """

    defaults: ClassVar[Mapping[str, Any]]
    refusal = None

    def __init__(self, settings: FilmSettings, patches: Patches) -> None:
        """Of a tower that takes such `patches`. Raises SettingError."""
        made = (settings.whole("patch_size"), settings.whole("merge_size"), settings.whole("temporal_patch_size"))
        if made != patches:
            raise SettingError(
                f"they make patches of (patch, merge, temporal) sizes {made}, but config.json asks for {patches}"
            )
        self.patch, self.merge, self.step = made
        self._pixels = FramePixels(settings)
        if not self._pixels.is_resized:
            raise SettingError("do_resize is off, and most films' frames cannot be cut into patches as they are")
        settings.crop_size()  # has no effect, but transformers refuses all films where it is missing
        size = settings.get("size")
        if not isinstance(size, dict) or set(size) != {"shortest_edge", "longest_edge"}:
            raise SettingError(f"size is {size}, and neither has shortest_edge and longest_edge alone")
        edges = settings.size("size")
        self.min_pixels, self.max_pixels = edges["shortest_edge"], edges["longest_edge"]
        self.is_capped = settings.get("cap_pixels_per_frame") is None or settings.flag("cap_pixels_per_frame")
        self.max_tokens = settings.whole("max_video_tokens") if self.is_capped else 0
        self.sampling = self.sampling_of(settings)

    @classmethod
    def load(cls, folder: Path, patches: Patches) -> Self | NoFilms:
        settings = FilmSettings.read(folder, cls.defaults)
        try:
            return cls(cls.known(settings), patches)
        except SettingError as error:
            return settings.refusal(error)

    @classmethod
    def known(cls, settings: FilmSettings) -> FilmSettings:
        """Those that the family's video processor reads, by their newest names."""
        return settings

    def sampling_of(self, settings: FilmSettings) -> Sampling:
        """Raises SettingError."""
        return Sampling.of(settings, self.step)

    @abstractmethod
    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]: ...

    @abstractmethod
    def frame_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the frames as they are encoded. Raises ValueError."""

    @abstractmethod
    def details(self, film: Film) -> dict[str, Detail]:
        """What the language model must know of the chosen frames."""

    @abstractmethod
    def cost(self) -> VideoCost: ...

    def features(self, film: Film) -> Features:
        """Raises EncoderError MEDIA_CORRUPT for frames that are far longer than wide, or the reverse."""
        frames = frames_tensor(film)
        count, _, height, width = frames.shape
        try:
            size = self.frame_size(count, height, width)
        except ValueError:
            raise frames_refused(width, height, MAX_ASPECT_RATIO) from None
        frames = self._pixels.resized(frames, *size)
        patches, grid = self._patches(frames)
        t, h, w = grid
        return Features(
            tensors={"pixel_values": patches, "image_grid_thw": torch.tensor([grid])},
            num_tokens=t * h * w // self.merge**2,
            cost=t * h * w,
            grid=grid,
            modality=Modality.VIDEO,
            details={"num_frames": count, **self.details(film)},
        )

    def _patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """The order of `patchify`: by layer, then by square of merged patches, then within it."""
        if pad := -len(frames) % self.step:
            frames = torch.cat([frames, frames[-1:].expand(pad, -1, -1, -1)])
        layers, patch, merge = len(frames) // self.step, self.patch, self.merge
        h, w = frames.shape[-2] // patch, frames.shape[-1] // patch
        out = torch.empty(layers, h * w, 3 * self.step * patch * patch)
        for layer in range(layers):  # so that only one layer is there in float32 twice
            pixels = self._pixels.normalised(frames[layer * self.step : (layer + 1) * self.step])
            cut = pixels.view(self.step, 3, h // merge, merge, patch, w // merge, merge, patch)
            out[layer] = cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(h * w, -1)
        return out.flatten(0, 1), (layers, h, w)


class Qwen2Films(QwenFilms):
    """Qwen2-VL: `Qwen2VLVideoProcessor`."""

    defaults = MappingProxyType(
        {
            **_COMMON,
            "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
            "image_mean": (0.48145466, 0.4578275, 0.40821073),
            "image_std": (0.26862954, 0.26130258, 0.27577711),
            "patch_size": 14,
            "max_video_tokens": 128000,
        }
    )

    @classmethod
    def known(cls, settings: FilmSettings) -> FilmSettings:
        """`min_pixels` and `max_pixels` go before what `size` says, which may have them by these names."""
        size = cls.defaults["size"] if settings.get("size") is None else settings.get("size")
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if isinstance(size, dict) and settings.get(old) is not None:
                size = {**{key: value for key, value in size.items() if key != old}, new: settings.get(old)}
        return settings.but(size=size)

    def sampling_of(self, settings: FilmSettings) -> Sampling:
        """With neither a number nor a rate, transformers takes all frames where it samples at all, and leaves the
        choice to its caller."""
        fps = settings.get("fps")
        sampling = super().sampling_of(settings.but(fps=USUAL_FPS if fps is None else fps))
        if sampling.num_frames is not None:
            number = round(sampling.num_frames / self.step) * self.step
            sampling = replace(sampling, num_frames=number, max_frames=number)
        if sampling.max_frames < self.step:
            raise SettingError(f"they ask for fewer frames than {self.step}, which are encoded together")
        return sampling

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        return evenly_from_start(self.sampling, info, options)

    def frame_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        factor = self.patch * self.merge
        most = self.max_pixels
        if self.is_capped:
            most = max(min(most, self._pixels_in_all * self.step // num_frames), int(self.min_pixels * 1.05))
        high, wide = smart_resize(height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=most)
        return int(high), int(wide)

    @property
    def _pixels_in_all(self) -> int:
        return int(self.max_tokens * (self.patch * self.merge) ** 2 * 0.9)

    def details(self, film: Film) -> dict[str, Detail]:
        return {"sampled_fps": sampled_fps(film, self.sampling.usual_fps)}

    def cost(self) -> VideoCost:
        return VideoCost(
            **self.sampling.cost(),
            frames_per_step=self.step,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            max_pixels_in_all=self._pixels_in_all * self.step if self.is_capped else 0,
        )


class Qwen25Films(Qwen2Films):
    """Qwen2.5-VL, which also tells how long a layer of patches lasts."""

    def details(self, film: Film) -> dict[str, Detail]:
        fps = sampled_fps(film, self.sampling.usual_fps)
        return {"sampled_fps": fps, "second_per_grid_ts": self.step / fps}


class Qwen3Films(QwenFilms):
    """Qwen3-VL: `Qwen3VLVideoProcessor`. The bounds of pixels are those of the whole film."""

    defaults = MappingProxyType(
        {
            **_COMMON,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
            "image_mean": (0.5, 0.5, 0.5),
            "image_std": (0.5, 0.5, 0.5),
            "patch_size": 16,
            "max_video_tokens": 768,
        }
    )

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        return evenly_to_end(self.sampling, info, options)

    def frame_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """`smart_resize` of `video_processing_qwen3_vl.py`, which needs two frames: one is padded to two here."""
        factor, count = self.patch * self.merge, max(num_frames, self.step)
        least, most = self.min_pixels, self.max_pixels
        if self.is_capped:
            each = min(self.max_tokens * factor**2, most // num_frames)
            most = max(each, int(least * 1.05)) * num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ValueError("too long")
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        layers = round(count / self.step) * self.step
        if layers * high * wide > most:
            beta = math.sqrt(count * height * width / most)
            high = max(factor, math.floor(height / beta / factor) * factor)
            wide = max(factor, math.floor(width / beta / factor) * factor)
        elif layers * high * wide < least:
            beta = math.sqrt(least / (count * height * width))
            high = math.ceil(height * beta / factor) * factor
            wide = math.ceil(width * beta / factor) * factor
        return high, wide

    def details(self, film: Film) -> dict[str, Detail]:
        fps = film.info.fps or self.sampling.usual_fps
        return {
            "sampled_fps": sampled_fps(film, self.sampling.usual_fps),
            "timestamps": times_of(film.indices, fps, self.step),
        }

    def cost(self) -> VideoCost:
        each = self.max_tokens * (self.patch * self.merge) ** 2
        return VideoCost(
            **self.sampling.cost(),
            frames_per_step=self.step,
            max_pixels=each if self.is_capped else 0,
            min_pixels_in_all=self.min_pixels,
            max_pixels_in_all=self.max_pixels,
            raises_short_sides=True,
        )
