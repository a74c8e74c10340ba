"""Items of models that no family here knows: the checkpoint's own processors, and rows by a run without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from PIL import Image
from torch import Tensor

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Detail, ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import Film, FilmInfo, Sound
from spmd_encoder.media.memory import is_out_of_memory, out_of_memory
from spmd_encoder.models import registry
from spmd_encoder.models.audio import LONGEST_S, check_length
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.fallback_films import Films
from spmd_encoder.models.fallback_media import PATCH, Pictures, Sounds
from spmd_encoder.models.fallback_model import METHODS, FeatureModel, Outcome, UnknownModelError
from spmd_encoder.models.video import sampled_fps

PartT = TypeVar("PartT")

_SIZES = ((640, 480), (200, 300))
_SECONDS = (5.0, 1.0)
"""Of the samples that tell at the start what a model gives."""
_MEASURED_S = 10.0
_STEEPEST = 4.0
"""Times the work per second that a long sound may take of what a short one does, where no processor bounds it."""
_LEAST_BOUND_S = 30.0

_FOR_LANGUAGE = "video_compression_mask"
"""VideoLLaMA 3's: which of a film's rows its language model takes, where transformers drops the others."""


class FallbackPreprocessor(Preprocessor):
    """`kept` are the parts of the model whose weights its rows come of, `width` the values of a row. `is_pooled`: every
    item has one row, which is its vector."""

    def __init__(self, folder: Path) -> None:
        """Raises StartupError where no items of any kind can be served, with the reason of each."""
        self.model = FeatureModel(folder)
        self._why: dict[Modality, str] = {}
        model_type = self.model.config.model_type
        self._pictures = self._ready(Modality.IMAGE, lambda: Pictures(folder, model_type))
        self._sounds = self._ready(Modality.AUDIO, lambda: Sounds(folder, model_type))
        by_pictures = "pixel_values" in self.model.takes(Modality.VIDEO)
        self._films = self._ready(Modality.VIDEO, lambda: Films(folder, self.model.config, takes_pictures=by_pictures))
        self.sampling_rate = self._sounds.rate if self._sounds else 0
        self.kept = tuple(self.model.parts())
        found = {modality: self._try(modality) for modality in self.served}
        self._refuse_other_widths({modality: found[modality][0].dim for modality in self.served})
        if not self.served:
            reasons = "; ".join(f"{modality}: {self._why[modality]}" for modality in self.model.methods())
            raise StartupError(
                f"{folder}: the fallback cannot serve model type {model_type!r} ({reasons}); there are families for: "
                f"{', '.join(registry.supported_model_types())}"
            )
        outcomes = [outcome for modality in self.served for outcome in found[modality]]
        used = frozenset[str]().union(*(outcome.touched for outcome in outcomes))
        self.kept = tuple(part for part in self.kept if any(_lies_in(name, part) for name in used))
        self.width = outcomes[0].dim
        self.is_pooled = all(outcome.rows == 1 for outcome in outcomes)

    @property
    def served(self) -> tuple[Modality, ...]:
        return tuple(modality for modality in METHODS if modality not in self._why)

    def not_served(self) -> dict[Modality, str]:
        return dict(self._why)

    def cost_table(self) -> CostTable:
        return self._costs

    @cached_property
    def _costs(self) -> CostTable:
        table = self._pictures.cost_table() if self._pictures else CostTable(patch=PATCH)
        return replace(
            table,
            audio=self._sounds.cost_table() if self._sounds else None,
            video=self._films.cost_table() if self._films else None,
        )

    def preprocess(self, image: Image.Image) -> Features:
        if self._pictures is None:
            return super().preprocess(image)
        what = f"a picture of {image.size[0]} x {image.size[1]} pixels"
        try:
            made = self._pictures.made(image)
        except EncoderError:
            raise
        except Exception as error:  # a processor that is not known here may raise anything
            raise _refused(what, error) from error
        return self._features(Modality.IMAGE, made, self._pictures.cost(made), what)

    def preprocess_audio(self, sound: Sound) -> Features:
        if self._sounds is None:
            return super().preprocess_audio(sound)
        check_length(sound, self._sounds.max_s)
        what = f"a sound of {1000 * len(sound.samples) / sound.rate:.1f} ms"
        # What fails for a length alone, where a sample of a second did not.
        is_short = len(sound.samples) < min(_SECONDS) * sound.rate
        try:
            made = self._sounds.made(sound)
        except Exception as error:
            raise _refused(what, error, is_short=is_short) from error
        return self._features(Modality.AUDIO, made, self._sounds.cost(made), what, is_short=is_short)

    def choose_frames(self, info: FilmInfo, options: ItemOptions) -> Sequence[int]:
        return super().choose_frames(info, options) if self._films is None else self._films.choose(info, options)

    def preprocess_video(self, film: Film) -> Features:
        if self._films is None:
            return super().preprocess_video(film)
        what = f"a film of {len(film.frames)} chosen frames of {film.info.width} x {film.info.height} pixels"
        try:
            made = self._films.made(film)
        except EncoderError:
            raise
        except Exception as error:
            raise _refused(what, error) from error
        features = self._features(Modality.VIDEO, made, self._films.cost(made), what)
        return replace(features, details=_details_of(film, made))

    def samples(self, modality: Modality) -> list[dict[str, Tensor]]:
        """What the processor makes of some items that any model should take."""
        if modality is Modality.IMAGE:
            assert self._pictures is not None
            return [self._pictures.made(Image.effect_noise(size, 64).convert("RGB")) for size in _SIZES]
        if modality is Modality.VIDEO:
            assert self._films is not None
            return self._films.samples()
        assert self._sounds is not None
        return [self._sounds.made_of_noise(seconds) for seconds in _SECONDS]

    def _ready(self, modality: Modality, make: Callable[[], PartT]) -> PartT | None:
        """One of the processors, unless it cannot be had or the model has no use for it."""
        if modality not in self.model.methods():
            self._why[modality] = f"{self.model.cls.__name__} has no {METHODS[modality]}"
            return None
        try:
            return make()
        except Exception as error:  # whatever an extractor that is not known here says of its checkpoint or of a sample
            self._why[modality] = first_line(error)
            return None

    def _try(self, modality: Modality) -> list[Outcome]:
        """What the model gives for some samples. A modality for which it fails is not served."""
        model = self.model
        try:
            if modality is Modality.AUDIO:
                self._bound_sounds()
            return [model.outcome(modality, model.inputs(modality, made)) for made in self.samples(modality)]
        except UnknownModelError as error:
            self._why[modality] = str(error)
        except Exception as error:  # the model's own code may raise anything
            self._why[modality] = f"its {METHODS[modality]} fails for a sample: {first_line(error)}"
        return []

    def _bound_sounds(self) -> None:
        """Where attention over a whole sound makes the work per second grow with the length, bound the length.

        The work on `t` seconds is `b * t + c * t**2`, of which two lengths tell both.
        """
        sounds = self._sounds
        if sounds is None or sounds.max_s < LONGEST_S:
            return
        once, twice = (
            self.model.work(Modality.AUDIO, self.model.inputs(Modality.AUDIO, sounds.made_of_noise(seconds)))
            for seconds in (_MEASURED_S, 2 * _MEASURED_S)
        )
        c = (twice - 2 * once) / (2 * _MEASURED_S**2)
        b = once / _MEASURED_S - c * _MEASURED_S
        if c * LONGEST_S > (_STEEPEST - 1) * b:
            sounds.max_s = max(_LEAST_BOUND_S, math.floor((_STEEPEST - 1) * b / c))

    def _refuse_other_widths(self, widths: Mapping[Modality, int]) -> None:
        """One width is told for all items: the one of the first modality that is served."""
        first = next(iter(widths), None)
        for modality, width in widths.items():
            if first is not None and width != widths[first]:
                self._why[modality] = f"its rows have {width} values, where those of {first} items have {widths[first]}"

    def _features(
        self, modality: Modality, made: Mapping[str, Tensor], cost: int, what: str, *, is_short: bool = False
    ) -> Features:
        try:
            inputs = self.model.inputs(modality, made)
            outcome = self.model.outcome(modality, inputs)
        except Exception as error:
            raise _refused(what, error, is_short=is_short) from error
        if not outcome.rows:
            raise EncoderError(ErrorCode.MEDIA_CORRUPT, f"{what} cannot be encoded: this model gives no row for it")
        if not all(any(_lies_in(name, part) for part in self.kept) for name in outcome.touched):
            raise EncoderError(
                ErrorCode.MEDIA_UNSUPPORTED, f"{what} takes a part of the model that no sample took, and is not loaded"
            )
        return Features(tensors=inputs, num_tokens=outcome.rows, cost=cost, modality=modality, grid=_grid_of(inputs))


def _grid_of(inputs: Mapping[str, Tensor]) -> tuple[int, int, int] | None:
    """Patches in time, high and wide, where the processor tells them as those of the Qwen-VL families do."""
    grid = inputs.get("image_grid_thw", inputs.get("video_grid_thw"))
    if grid is None or grid.shape != (1, 3):
        return None
    t, h, w = grid[0].tolist()
    return t, h, w


def _details_of(film: Film, made: Mapping[str, Tensor]) -> dict[str, Detail]:
    fps = film.info.fps or 1.0
    return {
        "num_frames": len(film.frames),
        "sampled_fps": sampled_fps(film, fps),
        "timestamps": [index / fps for index in film.indices],
        "duration": film.info.seconds,
        **({_FOR_LANGUAGE: made[_FOR_LANGUAGE].float().tolist()} if _FOR_LANGUAGE in made else {}),
    }


def _lies_in(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{part}.")


def first_line(error: Exception) -> str:
    """What is said to users of an error of code that is not ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refused(what: str, error: Exception, *, is_short: bool = False) -> EncoderError:
    if is_out_of_memory(error):
        return out_of_memory()
    if is_short:
        return EncoderError(ErrorCode.MEDIA_CORRUPT, f"{what} cannot be encoded: it is too short for this model")
    said = f"{type(error).__name__}: {first_line(error)}"
    return EncoderError(
        ErrorCode.MEDIA_CORRUPT, f"{what} cannot be encoded: the model's own code does not take it ({said})"
    )
