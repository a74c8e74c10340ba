"""Which further model types the fallback may serve: read from transformers' source, of which nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_METHOD = re.compile(r"^    def get_(image|audio|video)_features\(", re.MULTILINE)
_PACKAGE = "transformers.models"


def modeling_modules(model_type: str) -> tuple[str, ...]:
    """The modules of transformers with a model of this type that has `get_image_features`, `get_audio_features` or
    `get_video_features`.

    Empty where there is none, or no transformers.
    """
    name = _plain(model_type)
    return tuple(
        f"{_PACKAGE}.{file.parent.name}.{file.stem}"
        for folder in _folders()
        if _plain(folder.name) == name
        for file in sorted(folder.glob("modeling_*.py"))
        if _METHOD.search(file.read_text(encoding="utf-8"))
    )


def _folders() -> Iterator[Path]:
    spec = find_spec("transformers")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        models = Path(place) / "models"
        if models.is_dir():
            yield from sorted(models.iterdir())


def _plain(name: str) -> str:
    """A type and its folder are spelled alike but for marks: `blip-2` lies in `blip_2`, `kosmos-2.5` in `kosmos2_5`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
