"""A checkpoint's own settings: sizes that nothing can be made in, and what is said of those that cannot be used."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmd_encoder.errors import EncoderError, StartupError
from spmd_encoder.models.checkpoint import read_json
from spmd_encoder.models.own_code import class_of, in_a_line, is_own

log = logging.getLogger(__name__)

_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_MOST_SIDE = 2**16
"""Pixels. Real models take some thousand; what is made in a much larger size takes all memory."""
_MOST_AREA = 2**26
"""Pixels of the least picture that a smaller one is brought to."""
_MOST_TILES, _MOST_PATCHES = 2**12, 2**16
_SIDES = ("height", "width", "shortest_edge", "longest_edge", "size", "crop_size")
_AREAS = ("min_pixels",)
_TILES = ("max_patches",)
_TRANSFORMS = ("n_fft", "fft_window_size")
_MOST_TRANSFORM = 2**16
"""Samples of a window of sound. A bank of filters has a row for every second one."""

_CONFIG = "config.json"
_LAYERS = re.compile(r"(^|_)(layers|n_layer|depths?|blocks)$")
_MOST_LAYERS = 2**12
"""Of any one kind. Building those of a tower takes a millisecond each, whether or not there are weights for them."""
_WIDTHS = re.compile(r"(^|_)(sizes?|dims?|channels|heads|bins|experts|positions|d_model|n_embd|width)$")
_MOST_WIDTH = 2**24
_MOST_WORDS = 2**28
_NO_WIDTHS = re.compile(r"(chunk|window)_size$")
"""May be any number: what lies beyond every item bounds nothing."""
_NEVER_NEGATIVE = frozenset(
    (
        *(
            "hidden_size",
            "intermediate_size",
            "out_hidden_size",
            "d_model",
            "embed_dim",
            "projection_dim",
            "vocab_size",
        ),
        *("num_hidden_layers", "num_layers", "depth", "encoder_layers", "decoder_layers"),
        *("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        *("image_size", "patch_size", "num_channels", "in_channels", "num_mel_bins", "max_source_positions"),
    )
)
"""Others say -1 for what is not bounded, or count from the end."""


@contextmanager
def settings_of(folder: Path) -> Iterator[None]:
    """Around code whose errors come of what the checkpoint's files say: StartupError takes their place.

    Those of a group, of memory and of the disk stay as they are: trying again may help.
    """
    try:
        yield
    except Exception as error:  # transformers checks few of its settings, and says anything of the rest
        if not is_own(error):
            raise
        log.debug("settings in %s cannot be used", folder, exc_info=True)
        said = next(iter(error.message.splitlines()), "") if isinstance(error, EncoderError) else in_a_line(error)
        said += f", in {name}" if (name := class_of(error)) else ""
        raise StartupError(
            f"{folder}: config.json or the processor's file cannot be used ({said}); compare them with the original's, "
            "or download them again"
        ) from error


def refuse_absurd_sizes(folder: Path) -> None:
    """Raises StartupError where a processor's file asks for items that would take all memory, or `config.json` for a
    model that no memory holds.

    A file that cannot be read is passed over: whoever needs it says so.
    """
    for name in _PROCESSORS:
        for path, value, most in _sizes(_read(folder / name)):
            if value > most:
                raise _absurd(folder / name, path, value, f"at most {most} can be served")
    for path, value in _whole_numbers(_read(folder / _CONFIG)):
        key = path.rpartition(".")[2]
        if (most := _most_of_model(key)) and value > most:
            raise _absurd(folder / _CONFIG, path, value, f"at most {most} can be served")
        if value < 0 and key in _NEVER_NEGATIVE:
            raise _absurd(folder / _CONFIG, path, value, "there is no such size")


def _absurd(file: Path, path: str, value: float, why: str) -> StartupError:
    return StartupError(f"{file}: {path} is {value}, and {why}; download the file again")


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except (OSError, ValueError):
        return None


def _whole_numbers(said: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number with its path in the file; those of a list have the list's."""
    if isinstance(said, dict):
        for key, value in said.items():
            yield from _whole_numbers(value, f"{path}.{key}" if path else key)
    elif isinstance(said, list):
        for value in said:
            yield from _whole_numbers(value, path)
    elif isinstance(said, int) and not isinstance(said, bool):
        yield path, said


def _most_of_model(key: str) -> int:
    """What a setting of a model may be at most; 0: no bound."""
    if _LAYERS.search(key):
        return _MOST_LAYERS
    if not _WIDTHS.search(key) or _NO_WIDTHS.search(key):
        return 0
    return _MOST_WORDS if "vocab" in key else _MOST_WIDTH


def _sizes(said: Any, path: str = "", *, has_areas: bool = False) -> Iterator[tuple[str, float, int]]:
    """Every size with its path in the file and the most that it may be.

    Processors with a `temporal_patch_size` mean areas by the edges of all that they are given.
    """
    if not isinstance(said, dict):
        return
    has_areas = has_areas or "temporal_patch_size" in said
    for key, value in said.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, int | float):
            if most := _most(key, said, has_areas=has_areas):
                yield where, value, most
        else:
            yield from _sizes(value, where, has_areas=has_areas)


def _most(key: str, beside: dict[str, Any], *, has_areas: bool) -> int:
    """0: no bound. Edges are areas, too, where the longest of both is more than any side."""
    has_areas = has_areas or ("shortest_edge" in beside and _is_area(beside.get("longest_edge")))
    if key in ("shortest_edge", "longest_edge") and has_areas:
        return _MOST_AREA if key == "shortest_edge" else 0
    if key in _AREAS:
        return _MOST_AREA
    if key in _TILES:  # of which those who name the size of a patch mean patches
        return _MOST_PATCHES if "patch_size" in beside else _MOST_TILES
    if key in _TRANSFORMS:
        return _MOST_TRANSFORM
    return _MOST_SIDE if key in _SIDES else 0


def _is_area(longest: Any) -> bool:
    return isinstance(longest, int | float) and longest > _MOST_SIDE
