"""A checkpoint's own settings: sizes that nothing can be made in, and what is said of those that cannot be used."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmd_encoder.errors import EncoderError, StartupError

log = logging.getLogger(__name__)

_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_MOST_SIDE = 2**16
"""Pixels. Real models take some thousand; what is made in a much larger size takes all memory."""
_MOST_AREA = 2**26
"""Pixels of the least picture that a smaller one is brought to."""
_MOST_TILES = 2**12
_SIDES = ("height", "width", "shortest_edge", "longest_edge", "size", "crop_size")
_AREAS = ("min_pixels",)
_TILES = ("max_patches",)


@contextmanager
def settings_of(folder: Path) -> Iterator[None]:
    """Around code whose errors come of what the checkpoint's files say: StartupError takes their place.

    Those of a group, of memory and of the disk stay as they are (RuntimeError, MemoryError, OSError): trying again may
    help.
    """
    try:
        yield
    except (StartupError, RuntimeError, MemoryError, OSError):
        raise
    except Exception as error:  # transformers checks few of its settings, and says anything of the rest
        log.debug("settings in %s cannot be used", folder, exc_info=True)
        first = (str(error).strip().splitlines() or [""])[0]
        said = first if isinstance(error, EncoderError) else f"{type(error).__name__}: {first}"
        raise StartupError(
            f"{folder}: config.json or the processor's file cannot be used ({said}); compare them with the original's, "
            "or download them again"
        ) from error


def refuse_absurd_sizes(folder: Path) -> None:
    """Raises StartupError where a processor's file asks for pictures that would take all memory.

    A file that cannot be read is passed over: whoever needs it says so.
    """
    for name in _PROCESSORS:
        try:
            said = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        for path, value, most in _sizes(said):
            if value > most:
                raise StartupError(
                    f"{folder / name}: {path} is {value}, and at most {most} can be served; download the file again"
                )


def _sizes(said: Any, path: str = "") -> Iterator[tuple[str, float, int]]:
    """Every size with its path in the file and the most that it may be."""
    if not isinstance(said, dict):
        return
    for key, value in said.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, int | float):
            if most := _most(key, said):
                yield where, value, most
        else:
            yield from _sizes(value, where)


def _most(key: str, beside: dict[str, Any]) -> int:
    """0: no bound. Qwen's edges are areas: where the longest is more than any side."""
    longest = beside.get("longest_edge")
    if key in ("shortest_edge", "longest_edge") and "shortest_edge" in beside and _is_area(longest):
        return _MOST_AREA if key == "shortest_edge" else 0
    if key in _AREAS:
        return _MOST_AREA
    if key in _TILES:
        return _MOST_TILES
    return _MOST_SIDE if key in _SIDES else 0


def _is_area(longest: Any) -> bool:
    return isinstance(longest, int | float) and longest > _MOST_SIDE
