"""Films for models that no family here knows: the checkpoint's own processor of films, and what they cost.

transformers has its video processors for torchvision only. Some older models take their frames from an image processor
instead, which needs nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.utils.import_utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from spmd_encoder.api.cost import CostTable, VideoCost
from spmd_encoder.api.types import ItemOptions, MediaItem, Modality
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.fallback_media import MARGIN, PATCH, tensors_of, values_of, whole_defaults
from spmd_encoder.models.picture import MAX_ASPECT_RATIO, image_processor
from spmd_encoder.models.video import frames_refused, frames_tensor
from spmd_encoder.models.weights import from_folder

_USUAL = 32
"""Frames of a film where the checkpoint names neither a number nor a rate: transformers then takes them all."""
_MOST = 768
"""Frames of any film, whatever rate the checkpoint names: the server's default, by which films are priced."""
_NOT_OF_SAMPLING = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
_SECONDS = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
_RATE = 25.0
_SIZES = ((64, 64), (320, 240), (640, 480), (1280, 720))
"""(width, height) of frames that tell how prices go with sizes."""
_FEW, _MANY = 2, 8
"""Frames of the films that tell it."""

_SAMPLES = ((40, (320, 240)), (13, (200, 300)))
"""Frames and size of films that tell at the start what a model gives."""

Sampled = Callable[[FilmInfo, ItemOptions], list[int]]


class Films:
    """The checkpoint's processor of films, called as the whole processor of its model type would call it.

    `takes_pictures`: the model's method wants what an image processor makes (`pixel_values`) of a film's frames.
    """

    def __init__(self, folder: Path, config: PreTrainedConfig, *, takes_pictures: bool) -> None:
        """Raises StartupError where the processor cannot be had."""
        self._takes_pictures = takes_pictures
        if takes_pictures:
            self._processor = image_processor(folder)
            self._options = whole_defaults(config.model_type, "images_kwargs")
        else:
            if not is_torchvision_available():
                raise StartupError("transformers has its video processor for torchvision only, which is not installed")
            self._processor = from_folder(AutoVideoProcessor, folder)
            self._options = whole_defaults(config.model_type, "videos_kwargs")
        self._exactly = None if self._said("num_frames") else _frames_of_model(config)

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        """By the processor's own rule. Films that it refuses, being too short, are taken whole.

        A model that is made for a number of frames gets that number, short films' several times.
        """
        if self._exactly is not None:
            return _spread(info.num_frames, self._exactly)
        rule = dict(self._rule)
        if options.fps:
            rule.update(fps=options.fps, num_frames=None)
        if options.max_frames and rule.get("max_frames"):
            rule["max_frames"] = min(options.max_frames, rule["max_frames"])
        is_told = any(rule.get(name) for name in ("fps", "num_frames", "max_fps"))
        chosen: list[int] = []
        if is_told:
            with contextlib.suppress(Exception):  # whatever a rule that is not known here says of a film
                chosen = [int(index) for index in self._processor.sample_frames(metadata=metadata_of(info), **rule)]
        # Rounding adds one beyond the film's end at times.
        chosen = sorted(index for index in chosen if 0 <= index < info.num_frames)
        usual = rule.get("num_frames") or _USUAL
        chosen = chosen or _spread(info.num_frames, min(info.num_frames, usual))
        most = min(options.max_frames or _MOST, rule.get("max_frames") or _MOST, _MOST, len(chosen))
        return [chosen[at] for at in _spread(len(chosen), most)]

    def made(self, film: Film) -> dict[str, Tensor]:
        """Its tensors for the chosen frames. Raises EncoderError MEDIA_CORRUPT for frames that it does not take."""
        frames = frames_tensor(film)
        height, width = frames.shape[-2:]
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise frames_refused(width, height, MAX_ASPECT_RATIO)
        if self._exactly is not None:
            if len(frames) > self._exactly:
                raise EncoderError(
                    ErrorCode.MEDIA_CORRUPT,
                    f"a film of {len(frames)} pictures cannot be encoded: this model takes {self._exactly} of a film",
                )
            frames = frames[_spread(len(frames), self._exactly)]  # some may have been lost to a broken file
        if self._takes_pictures:
            pictures = [Image.fromarray(frame) for frame in frames.permute(0, 2, 3, 1).numpy()]
            return tensors_of(self._processor([pictures], return_tensors="pt", **self._options))
        metadata = metadata_of(film.info, film.indices)
        said = {name: value for name, value in self._options.items() if name not in _NOT_OF_SAMPLING}
        return tensors_of(
            self._processor(
                videos=[frames],
                video_metadata=[metadata],
                do_sample_frames=False,
                input_data_format="channels_first",
                return_tensors="pt",
                **said,
            )
        )

    def samples(self) -> list[dict[str, Tensor]]:
        """Its tensors for some films that any model should take."""
        films = [_film(len(self.choose(_film(count, size).info, ItemOptions())), size) for count, size in _SAMPLES]
        return [self.made(film) for film in films]

    def cost(self, made: Mapping[str, Tensor]) -> int:
        return max(1, math.ceil(values_of(made) / (3 * PATCH**2)))

    def cost_table(self) -> VideoCost:
        if self._exactly is None:
            return price_films(self.choose, self._cost_of)
        dearest = max((cost for size in _SIZES if (cost := self._cost_of(self._exactly, size)) is not None), default=1)
        count = self._exactly
        return VideoCost(fps=0, min_frames=count, max_frames=count, frames_per_step=count, tokens_per_step=dearest)

    def _cost_of(self, count: int, size: tuple[int, int]) -> int | None:
        try:
            return self.cost(self.made(_film(count, size)))
        except Exception:  # whatever a processor that is not known here says of a film
            return None

    def _said(self, name: str) -> Any:
        return self._options.get(name, getattr(self._processor, name, None))

    @cached_property
    def _rule(self) -> dict[str, Any]:
        """What the processor's own `preprocess` would call `sample_frames` with."""
        if self._takes_pictures:
            return {}
        names = [name for name in self._processor.valid_kwargs.__annotations__ if name not in _NOT_OF_SAMPLING]
        return {name: self._said(name) for name in names}


def _film(count: int, size: tuple[int, int]) -> Film:
    """`count` frames of noise of `size` (width, height), ten of each second."""
    frame = np.array(Image.effect_noise(size, 64).convert("RGB"))
    info = FilmInfo(num_frames=count, fps=10.0, seconds=count / 10, width=size[0], height=size[1])
    numbers = tuple(range(count))
    return Film(frames=(frame,) * count, times=tuple(n / 10 for n in numbers), indices=numbers, info=info)


def price_films(choose: Sampled, cost_of: Callable[[int, tuple[int, int]], int | None]) -> VideoCost:
    """The number of frames by a film's length; frames by their area where that fits, in all where the processor bounds
    them together, else each as the dearest one.

    `cost_of` so many frames of a (width, height) is None where they are refused.
    """
    counts = {seconds: len(choose(_film_info(seconds), ItemOptions())) for seconds in _SECONDS}
    least, most = min(counts.values()), max(counts.values())
    # A rate is seen in films between the shortest and the longest; without one every film is priced as the longest.
    seen = [n / seconds for seconds, n in counts.items() if least < n < most and n < _film_info(seconds).num_frames]
    plain = VideoCost(fps=max(seen, default=0.0), min_frames=least if seen else most, max_frames=most)
    found = {size: cost for size in _SIZES if (cost := cost_of(_FEW, size)) is not None}
    if not found:
        return replace(plain, tokens_per_step=1)
    dearest, largest = max(found.values()), max(found)
    fixed = replace(plain, tokens_per_step=math.ceil(dearest / _FEW))
    if len(set(found.values())) == 1:
        return fixed
    least_pixels, most_pixels = min(found.values()) * PATCH**2, dearest * PATCH**2
    if (many := cost_of(_MANY, largest)) is not None and many <= MARGIN * dearest:
        by_area = replace(plain, min_pixels_in_all=least_pixels, max_pixels_in_all=max(many * PATCH**2, most_pixels))
    else:
        is_bounded = most_pixels * MARGIN < _FEW * math.prod(largest)
        by_area = replace(plain, min_pixels=least_pixels // _FEW, max_pixels=most_pixels // _FEW if is_bounded else 0)
    table = CostTable(patch=PATCH, video=by_area)
    fits = all(cost <= MARGIN * table.tokens(_item(_FEW, size)) for size, cost in found.items())
    return by_area if fits else fixed


def _item(count: int, size: tuple[int, int]) -> MediaItem:
    return MediaItem(modality=Modality.VIDEO, data=b"", digest="", width=size[0], height=size[1], frames=count)


def _film_info(seconds: float) -> FilmInfo:
    return FilmInfo(num_frames=max(1, round(seconds * _RATE)), fps=_RATE, seconds=seconds, width=320, height=240)


def metadata_of(info: FilmInfo, indices: Sequence[int] | None = None) -> VideoMetadata:
    """The film as transformers' video processors are told of it, and which of its frames were chosen."""
    return VideoMetadata(
        total_num_frames=info.num_frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        duration=info.seconds,
        frames_indices=None if indices is None else list(indices),
    )


def _frames_of_model(config: PreTrainedConfig) -> int | None:
    """How many frames its `config.json` makes the model for, as far as it says so."""
    for part in (config, getattr(config, "vision_config", None)):
        if isinstance(count := getattr(part, "num_frames", None), int) and count > 0:
            return count
    return None


def _spread(total: int, count: int) -> list[int]:
    """`count` of `total` in equal steps from the first one, as `default_sample_indices_fn` of `video_utils.py`."""
    return [at * total // count for at in range(count)]
