"""A checkpoint's settings of films: each is obeyed as transformers' video processors do, or films are refused with why.

In their files `null` is a value: it switches off what is on by default. What is not named has the class's default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from transformers.image_processing_utils import get_size_dict

from spmd_encoder.api.cost import VideoCost
from spmd_encoder.api.types import ItemOptions
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.base import Features

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "default_to_square": True}
)
"""Those that all video processors have."""
_MOST_FPS = 1000.0
_MOST = 2**31


class SettingError(ValueError):
    """A setting that cannot be obeyed. The words say which and why."""


class FilmMaker(Protocol):
    """A family's films: which frames, and their features."""

    @property
    def refusal(self) -> str | None:
        """Why no film is taken, if so."""

    def choose(self, info: FilmInfo, options: ItemOptions) -> list[int]: ...

    def features(self, film: Film) -> Features: ...

    def cost(self) -> VideoCost | None: ...


@dataclass(frozen=True)
class NoFilms:
    """Stands for a family's films where the checkpoint's settings cannot be obeyed. Its pictures are served."""

    refusal: str

    def choose(self, info: FilmInfo, options: ItemOptions) -> NoReturn:
        """Raises EncoderError MEDIA_UNSUPPORTED, as `features`."""
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, self.refusal)

    def features(self, film: Film) -> NoReturn:
        raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, self.refusal)

    def cost(self) -> None:
        return None


@dataclass(frozen=True)
class FilmSettings:
    """What `file` says, over a family's defaults. All but `read` raise SettingError."""

    values: Mapping[str, Any]
    file: str = "those of its family, as no file has any"

    @classmethod
    def read(cls, folder: Path, defaults: Mapping[str, Any]) -> FilmSettings:
        """From the file that transformers would take them from.

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
                if found is not None:
                    return cls({**_DEFAULTS, **defaults, **found}, name)
            except (ValueError, AttributeError, TypeError):
                raise StartupError(f"{folder / name} is not a JSON object") from None
        return cls({**_DEFAULTS, **defaults})

    def but(self, **values: Any) -> FilmSettings:
        """The same with other values, whatever the file says."""
        return FilmSettings({**self.values, **values}, self.file)

    def refusal(self, error: SettingError) -> NoFilms:
        return NoFilms(f"this checkpoint's settings of films ({self.file}) cannot be obeyed: {error}")

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def number(self, name: str, *, most: float = _MOST) -> float:
        """More than 0."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise SettingError(f"{name} is {_shown(value)}, and not a number above 0 and up to {most:g}")
        return float(value)

    def rate(self, name: str = "fps") -> float:
        """Frames of each second."""
        return self.number(name, most=_MOST_FPS)

    def whole(self, name: str, *, least: int = 1, most: int = _MOST) -> int:
        return _whole(name, self.get(name), least, most)

    def per_channel(self, name: str) -> list[float]:
        """One value for all channels of a pixel, or three."""
        value = self.get(name)
        values = list(value) if isinstance(value, list | tuple) else [value]
        is_usable = all(isinstance(one, int | float) and math.isfinite(one) for one in values)
        if not is_usable or len(values) not in (1, 3):
            raise SettingError(f"{name} is {_shown(value)}, and neither a number nor three of them")
        return [float(one) for one in values]

    def size(self, name: str) -> dict[str, int]:
        """As transformers reads sizes, which may also be a number or two."""
        square = name != "size" or self.flag("default_to_square")
        try:
            said = dict(get_size_dict(self.get(name), default_to_square=square, param_name=name))
        except Exception:  # it checks no types
            raise SettingError(f"{name} is {_shown(self.get(name))}, which is no size") from None
        return {key: _whole(f"{name}.{key}", value, 1, _MOST) for key, value in said.items() if value is not None}

    def crop_size(self) -> tuple[int, int] | None:
        """(height, width) that frames are cropped or padded to, if so."""
        if not self.flag("do_center_crop"):
            return None
        size = self.size("crop_size")
        if set(size) != {"height", "width"}:
            raise SettingError(f"crop_size is {_shown(self.get('crop_size'))}, and has no height and width")
        return size["height"], size["width"]


def _whole(name: str, value: Any, least: int, most: int) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_whole or int(value) != value or not least <= value <= most:
        raise SettingError(f"{name} is {_shown(value)}, and not a whole number from {least} to {most}")
    return int(value)


def _shown(value: Any) -> str:
    """As JSON has it."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
