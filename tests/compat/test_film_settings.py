"""What a checkpoint says of films beside transformers' own video processors: obeyed alike, or refused at the start.

`make torchvision` runs this.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd_encoder.api.types import ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film
from spmd_encoder.models import registry
from spmd_encoder.models.base import Preprocessor
from spmd_encoder.models.fallback_films import metadata_of
from spmd_encoder.models.loading import adapter_class, load_preprocessor
from spmd_encoder.models.settings import refuse_absurd_sizes
from tests.compat.test_video_processors import CAPPED, CLASSES, close
from tests.harness.clips import film

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="`make torchvision` runs this with torchvision"
)

PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "glm4v", "glm46v")
FRAMES = ("llava_next_video", "llava_onevision", "internvl", "smolvlm")
ALL = (*PATCHES, *FRAMES)
SAMPLING: dict[str, Any] = {
    **{family: {"fps": 2} for family in PATCHES},
    **{family: {"num_frames": 6} for family in FRAMES},
    "smolvlm": {"num_frames": 6, "fps": 3},
}
"""What each checkpoint says before it is changed, as its processor would ask its caller otherwise."""
SIZES = ((160, 120), (97, 201), (112, 112), (40, 300))
Change = dict[str, Any]
SQUARE = {"height": 112, "width": 112}

OBEYED: list[tuple[tuple[str, ...], Change]] = [
    (ALL, {}),
    (ALL, {"do_rescale": False}),
    (ALL, {"do_rescale": None}),
    (ALL, {"do_normalize": False}),
    (ALL, {"do_normalize": None, "image_mean": None}),
    (ALL, {"do_rescale": False, "do_normalize": False}),
    (ALL, {"do_convert_rgb": False}),
    (ALL, {"rescale_factor": 1 / 127.5}),
    (ALL, {"rescale_factor": 1}),
    (ALL, {"image_mean": 0.5, "image_std": 0.25}),
    (ALL, {"image_mean": [0.4], "image_std": [2]}),
    (ALL, {"image_mean": 0, "image_std": 1, "do_rescale": False}),
    (ALL, {"resample": 0}),
    (ALL, {"resample": 1}),
    (ALL, {"resample": 2}),
    (ALL, {"do_pad": True}),
    (ALL, {"do_pad": False}),
    (ALL, {"data_format": "channels_first", "device": "cpu", "return_metadata": False, "video_metadata": None}),
    (ALL, {"min_pixels": 12544, "max_pixels": 40000}),
    (("qwen2_vl", "qwen2_5_vl"), {"size": None}),
    (
        ("qwen2_vl", "qwen2_5_vl"),
        {"size": {"min_pixels": 1, "max_pixels": 2}, "min_pixels": 12544, "max_pixels": 40000},
    ),
    (("qwen2_vl", "qwen3_vl", "glm4v"), {"size": {"shortest_edge": 200000, "longest_edge": 100000}}),
    (PATCHES, {"do_center_crop": True, "crop_size": 56}),
    (PATCHES, {"cap_pixels_per_frame": False}),
    (PATCHES, {"max_video_tokens": 20}),
    (PATCHES, {"fps": 5}),
    (PATCHES, {"max_image_size": {"longest_edge": 10}}),
    (PATCHES, {"min_frames": 8, "max_frames": 9}),
    (PATCHES, {"max_frames": 5, "fps": 20}),
    (("qwen2_vl", "qwen2_5_omni", "qwen3_vl"), {"num_frames": 9, "fps": None}),
    (("qwen2_vl", "qwen2_5_omni", "qwen3_vl"), {"num_frames": 7, "fps": None, "min_frames": 20, "max_frames": 4}),
    (("qwen3_vl",), {"num_frames": 50, "fps": None}),
    (("qwen3_vl",), {"fps": None}),
    (("qwen3_vl",), {"fps": None, "max_frames": 11}),
    (("qwen3_vl",), {"fps": None, "min_frames": 60}),
    (("glm4v", "glm46v"), {"num_frames": 3}),
    (("glm4v", "glm46v"), {"max_duration": 1}),
    (("glm46v",), {"fps": None}),
    (("llava_next_video", "llava_onevision", "internvl"), {"num_frames": 40}),
    (("llava_next_video", "llava_onevision"), {"num_frames": None, "fps": 3}),
    (("internvl",), {"num_frames": None, "fps": 12}),
    (("internvl",), {"initial_shift": False}),
    (("internvl",), {"initial_shift": 3}),
    (("internvl",), {"initial_shift": 0.5}),
    (("llava_onevision", "internvl"), {"size": [112, 112]}),
    (("internvl",), {"size": 112}),
    (("llava_onevision",), {"size": 112, "default_to_square": True}),
    (
        ("llava_next_video", "llava_onevision", "internvl"),
        {"size": {"height": 150, "width": 130}, "do_center_crop": True},
    ),
    (("llava_next_video", "llava_onevision", "internvl"), {"size": {"shortest_edge": 150}, "do_center_crop": True}),
    (("llava_next_video", "llava_onevision", "internvl"), {"size": {"shortest_edge": 41}, "do_center_crop": True}),
    (("llava_next_video", "llava_onevision", "internvl"), {"do_resize": False, "do_center_crop": True, "resample": 9}),
    (("llava_next_video",), {"do_resize": None}),
    (("llava_next_video",), {"crop_size": 112, "size": 130}),
    (("llava_next_video",), {"do_center_crop": None, "size": [112, 112]}),
    (("smolvlm",), {"size": {"height": 70, "width": 200}}),
    (("smolvlm",), {"size": {"longest_edge": 5000}}),
    (("smolvlm",), {"video_sampling": {"fps": 4, "max_frames": 6, "video_size": {"longest_edge": 128}}}),
    (("smolvlm",), {"do_center_crop": True, "crop_size": 56}),
]

REFUSED: list[tuple[tuple[str, ...], Change, str]] = [
    (tuple(one for one in ALL if one != "llava_next_video"), {"do_resize": False}, "do_resize is off|different sizes"),
    (tuple(one for one in ALL if one != "llava_next_video"), {"do_resize": None}, "do_resize is off|different sizes"),
    (ALL, {"resample": None}, "resample is null"),
    (ALL, {"resample": 4}, "resample is 4"),
    (ALL, {"resample": 9}, "resample is 9"),
    (ALL, {"image_mean": None}, "image_mean is null"),
    (ALL, {"image_mean": [0.5, 0.5]}, r"image_mean is \[0.5, 0.5\]"),
    (ALL, {"image_std": [0, 0, 0]}, "image_std has a 0"),
    (ALL, {"image_std": 0.0}, "image_std has a 0"),
    (ALL, {"rescale_factor": 0}, "rescale_factor is 0"),
    (ALL, {"rescale_factor": "x"}, 'rescale_factor is "x"'),
    (ALL, {"do_center_crop": True, "crop_size": None}, "crop_size is null"),
    (PATCHES, {"patch_size": 0}, "patch_size is 0"),
    (PATCHES, {"patch_size": 7}, r"sizes \(7, 2, 2\), but config.json asks for"),
    (PATCHES, {"merge_size": 3}, r"3, 2\), but config.json asks for"),
    (PATCHES, {"temporal_patch_size": 4}, r"2, 4\), but config.json asks for"),
    (("qwen2_vl", "qwen3_vl", "glm4v"), {"size": {"height": 112, "width": 112}}, "size is .* alone"),
    (("qwen2_vl", "qwen3_vl", "glm4v"), {"size": {"shortest_edge": 0, "longest_edge": 9}}, "size.shortest_edge is 0"),
    (("qwen3_vl", "glm4v"), {"size": None}, "size is None"),
    (("qwen2_vl",), {"max_frames": 1}, "fewer frames than 2"),
    (("qwen2_vl",), {"num_frames": 1, "fps": None}, "fewer frames than 2"),
    (("glm4v",), {"fps": None}, "fps is null"),
    (("glm4v",), {"max_duration": 0}, "max_duration is 0"),
    (("internvl",), {"initial_shift": None}, "initial_shift is None"),
    (("llava_onevision", "internvl"), {"size": {"height": 56, "width": 56}}, r"frames to \(height, width\) \(56, 56\)"),
    (("llava_onevision",), {"size": 112}, "different sizes"),
    (("llava_next_video",), {"crop_size": 56}, r"frames to \(height, width\) \(56, 56\)"),
    (("llava_next_video",), {"do_center_crop": None}, "different sizes"),
    (("smolvlm",), {"max_image_size": {"longest_edge": 56}}, r"frames to \(height, width\) \(56, 56\)"),
    (("smolvlm",), {"max_image_size": None}, "max_image_size is None"),
    (("smolvlm",), {"video_sampling": {"fps": 4}}, "video_sampling is"),
    (("smolvlm",), {"size": None}, "size is null"),
    (
        ("smolvlm",),
        {"size": None, "video_sampling": {"fps": 4, "max_frames": 3, "video_size": {"longest_edge": 128}}},
        "size is null",
    ),
]

OURS_TO_SAY = {"do_sample_frames", "input_data_format", "return_tensors"}
"""Films are always sampled; how their frames are passed and returned is the server's own matter."""


def expanded(cases: list[Any]) -> Iterator[Any]:
    for families, change, *rest in cases:
        for family in families:
            yield pytest.param(family, change, *rest, id=f"{family}-{change}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in ALL:
        made[family] = tmp_path_factory.mktemp(family)
        adapter_class(registry.find(family)).tiny_checkpoint(made[family], seed=0)
    return made


def changed(tiny: Path, folder: Path, family: str, change: Change) -> None:
    for file in tiny.glob("*.json"):
        shutil.copy(file, folder)
    said = json.loads((folder / "preprocessor_config.json").read_text())
    if family in FRAMES[:1]:
        said["do_center_crop"] = True
    if family in CAPPED:
        said["cap_pixels_per_frame"] = True
    if family in ("llava_onevision", "internvl"):
        said["crop_size"] = SQUARE
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**said, **SAMPLING[family], **change}))


def theirs(family: str, folder: Path, one: Film) -> tuple[list[int], dict[str, torch.Tensor]]:
    import transformers

    options: dict[str, Any] = {}
    films: Any = getattr(adapter_class(registry.find(family)), "films", None)
    if longest := getattr(films, "longest_edge", None):  # of Omni: its whole processor gives it
        options["size"] = {"shortest_edge": longest // 6, "longest_edge": longest}
    processor = getattr(transformers, CLASSES[family]).from_pretrained(folder)
    made = processor(
        videos=[np.stack(one.frames)],
        video_metadata=[metadata_of(one.info, range(len(one.frames)))],
        do_sample_frames=True,
        return_metadata=True,
        return_tensors="pt",
        **options,
    )
    return [int(index) for index in made.pop("video_metadata")[0].frames_indices], dict(made)


def ours(preprocessor: Preprocessor, one: Film) -> tuple[list[int], dict[str, torch.Tensor]]:
    chosen = list(preprocessor.choose_frames(one.info, ItemOptions()))
    frames = tuple(one.frames[index] for index in chosen)
    times = tuple(index / one.info.fps for index in chosen)
    picked = Film(frames=frames, times=times, indices=tuple(chosen), info=one.info)
    return chosen, dict(preprocessor.preprocess_video(picked).tensors)


@pytest.mark.parametrize(("family", "change"), expanded(OBEYED))
def test_what_is_obeyed_is_equal(family: str, change: Change, tiny: dict[str, Path], tmp_path: Path) -> None:
    changed(tiny[family], tmp_path, family, change)
    preprocessor = load_preprocessor(tmp_path)
    assert preprocessor.not_served() == {}
    for size in SIZES:
        one = film(41, *size)
        (want_chosen, want), (got_chosen, got) = theirs(family, tmp_path, one), ours(preprocessor, one)
        assert got_chosen == want_chosen
        pixels = want["pixel_values" if family == "smolvlm" else "pixel_values_videos"].float()
        if "video_grid_thw" in want:
            assert got["image_grid_thw"].tolist() == want["video_grid_thw"].tolist()
        else:
            pixels = pixels.flatten(0, 1)
        assert close(got["pixel_values"] / pixels.abs().max(), pixels / pixels.abs().max())


@pytest.mark.parametrize(("family", "change", "why"), expanded(REFUSED))
def test_what_is_not_obeyed_is_refused_at_the_start(
    family: str, change: Change, why: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    changed(tiny[family], tmp_path, family, change)
    preprocessor = load_preprocessor(tmp_path)
    reason = preprocessor.not_served()[Modality.VIDEO]
    assert re.search(why, reason), reason
    assert "video_preprocessor_config.json" in reason
    with pytest.raises(EncoderError) as caught:
        preprocessor.choose_frames(film(4, 64, 64).info, ItemOptions())
    assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED
    fits = 0
    for size in SIZES:  # nor does transformers give for all films what the tower takes
        try:
            _, made = theirs(family, tmp_path, film(41, *size))
        except Exception:  # whatever it says of such a setting
            continue
        fits += tower_takes(family, made)
    assert fits < len(SIZES)


def tower_takes(family: str, made: dict[str, torch.Tensor]) -> bool:
    if "video_grid_thw" in made:
        patch = 16 if family == "qwen3_vl" else 14
        is_even = not bool((made["video_grid_thw"][:, 1:] % 2).any())
        pixels = made["pixel_values_videos"]
        return is_even and pixels.shape[-1] == 3 * 2 * patch**2 and bool(pixels.isfinite().all())
    pixels = made["pixel_values" if family == "smolvlm" else "pixel_values_videos"]
    return tuple(pixels.shape[-2:]) == (112, 112) and bool(pixels.isfinite().all())


@pytest.mark.parametrize("family", ALL)
def test_no_setting_that_transformers_knows_is_forgotten(family: str) -> None:
    import transformers

    known = set(getattr(transformers, CLASSES[family]).valid_kwargs.__annotations__)
    tried = {key for families, change, *_ in [*OBEYED, *REFUSED] if family in families for key in change}
    assert known - tried - OURS_TO_SAY - {"default_to_square", "crop_size", "num_frames", "fps", "size"} == set()


def processors() -> list[str]:
    import transformers

    return [name for name in dir(transformers) if name.endswith(("VideoProcessor", "ImageProcessor"))]


def test_the_default_files_of_all_processors_are_left_alone(tmp_path: Path) -> None:
    import transformers
    from transformers.image_processing_utils import BaseImageProcessor

    tried = 0
    for name in processors():
        kind = getattr(transformers, name)
        if not (isinstance(kind, type) and issubclass(kind, BaseImageProcessor)):
            continue
        folder = tmp_path / name
        try:
            kind().save_pretrained(folder)
        except (TypeError, ValueError, ImportError, NotImplementedError):
            continue  # it cannot be made without anything
        refuse_absurd_sizes(folder)
        tried += 1
    assert tried > 80
