"""Films for the GLM-V families: patches as Qwen's, frames chosen by their seconds."""

from __future__ import annotations

import math
from abc import abstractmethod
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from spmd_encoder.api.cost import VideoCost
from spmd_encoder.api.types import Detail, ItemOptions
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.film_settings import FilmSettings, SettingError
from spmd_encoder.models.frame_films import CLIP_MEAN, CLIP_STD
from spmd_encoder.models.qwen_video import Qwen3Films
from spmd_encoder.models.video import Sampling, sampled_fps

_COMMON = MappingProxyType[str, Any](
    {
        "resample": 3,
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "fps": 2.0,
        "max_duration": 300,
    }
)


class GlmFilms(Qwen3Films):
    """What both video processors share. The last of an odd number of chosen frames is taken twice."""

    max_frames: ClassVar[int]
    """Of a film, whatever the checkpoint says."""

    @classmethod
    def known(cls, settings: FilmSettings) -> FilmSettings:
        """Without those of Qwen's that these processors do not read."""
        return settings.but(num_frames=None, min_frames=1, max_frames=cls.max_frames, cap_pixels_per_frame=False)

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        most = min(self.sampling.max_frames, options.max_frames or self.sampling.max_frames)
        most = max(1, most - most % 2)
        fps = info.fps or self.sampling.usual_fps
        seconds = info.seconds or round((info.num_frames - 1) / fps) + 1
        last = info.num_frames - 1
        found = self.by_seconds(info.num_frames, fps, seconds, options.fps, most)
        chosen = list(dict.fromkeys(min(last, index) for index in found))
        if len(chosen) % 2 and most > 1:
            chosen.append(chosen[-1])
        return chosen

    @abstractmethod
    def by_seconds(self, total: int, fps: float, seconds: float, wanted: float | None, most: int) -> list[int]:
        """At most `most` of a film's `total` frames, ascending, `wanted` of each second where a request says so."""

    def details(self, film: Film) -> dict[str, Detail]:
        """`timestamps` has the second of the first frame of each layer, as the prompt has it."""
        fps = film.info.fps or self.sampling.usual_fps
        return {
            "sampled_fps": sampled_fps(film, self.sampling.usual_fps),
            "timestamps": [index / fps for index in film.indices[:: self.step]],
        }


class Glm4vFilms(GlmFilms):
    """`Glm4vVideoProcessor`: `fps` frames of each second, of longer films than `max_duration` spread out."""

    defaults = _COMMON
    max_frames = 600

    def sampling_of(self, settings: FilmSettings) -> Sampling:
        self.max_seconds = settings.number("max_duration")
        if not (most := int(self.max_seconds * settings.rate())):
            raise SettingError("max_duration and fps leave no frame")
        return super().sampling_of(settings.but(max_frames=most))

    def by_seconds(self, total: int, fps: float, seconds: float, wanted: float | None, most: int) -> list[int]:
        wanted = wanted or self.sampling.usual_fps
        count = max(int(min(seconds, self.max_seconds) * wanted), 1)
        if seconds <= self.max_seconds and count <= most:
            return [math.ceil(index * fps / wanted) for index in range(count)]
        count = min(count, most)
        if count >= total:
            return list(range(total))
        return [math.ceil(second * fps) for second in np.linspace(0, seconds, count, endpoint=True)]

    def cost(self) -> VideoCost:
        return VideoCost(
            **self.sampling.cost(),
            frames_per_step=self.step,
            min_pixels_in_all=self.min_pixels,
            max_pixels_in_all=self.max_pixels,
            raises_short_sides=True,
        )


class Glm46VFilms(GlmFilms):
    """`Glm46VVideoProcessor`: the longer a film is, the fewer layers of each second are taken."""

    defaults = _COMMON
    max_frames = 640
    rates = ((30.0, 3.0), (300.0, 1.0), (2400.0, 0.5))
    """(seconds up to which it holds, layers per second); longer films are taken as if they had the last."""

    @classmethod
    def known(cls, settings: FilmSettings) -> FilmSettings:
        return super().known(settings).but(fps=2.0)  # its processor has rates of its own

    def by_seconds(self, total: int, fps: float, seconds: float, wanted: float | None, most: int) -> list[int]:
        counted = min(seconds, self.rates[-1][0])
        layers = next(rate for up_to, rate in self.rates if counted <= up_to)
        wanted = wanted or layers * self.step
        count = max(1, min(int(counted * wanted), most))
        if total >= count:
            chosen = _first_of_each(total, 1 / fps, 1 / wanted, int(seconds), count)
            if len(chosen) == count:
                return chosen
            if len(chosen) < count:
                return _spread(chosen[0], chosen[-1], count)
        return _spread(0, total - 1, count)

    def cost(self) -> VideoCost:
        (first, fast), (second, slow), (_, slowest) = self.rates
        return VideoCost(
            fps=fast * self.step,
            slower=((first, slow * self.step), (second, slowest * self.step)),
            min_frames=1,
            max_frames=self.sampling.max_frames,
            frames_per_step=self.step,
            min_pixels_in_all=self.min_pixels,
            max_pixels_in_all=self.max_pixels,
            raises_short_sides=True,
        )


def _first_of_each(total: int, frame: float, step: float, end: int, most: int) -> list[int]:
    """The first frame of each `step` seconds, before second `end`: one more than `most` tells that there are more.

    `frame` is how many seconds one lasts. The sums are those of the processor, which looks at every frame.
    """
    chosen: list[int] = []
    second = 0.0
    index = 0
    while index < total and len(chosen) <= most:
        guess = max(index, math.floor(second / frame) - 1)
        while guess < total and guess * frame < second:
            guess += 1
        if guess >= total:
            break
        chosen.append(guess)
        second += step
        index = guess + 1
        if second >= end:
            break
    return chosen


def _spread(first: int, last: int, count: int) -> list[int]:
    indices: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return indices
