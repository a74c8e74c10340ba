"""Our films beside transformers' own video processors, which need torchvision: `make torchvision` runs this."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from spmd_encoder.api.types import ItemOptions, Modality
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models import registry
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.fallback_films import metadata_of
from spmd_encoder.models.frame_films import FrameFilms, InternFilms, NextVideoFilms, OnevisionFilms
from spmd_encoder.models.loading import adapter_class, load_preprocessor
from tests.harness.clips import film

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="`make torchvision` runs this with torchvision"
)

CLASSES = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_omni": "Qwen2VLVideoProcessor",
    "qwen3_omni_moe": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_vl_moe": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "qwen3_5_moe": "Qwen3VLVideoProcessor",
    "glm4v": "Glm4vVideoProcessor",
    "glm4v_moe": "Glm4vVideoProcessor",
    "glm46v": "Glm46VVideoProcessor",
    "llava_next_video": "LlavaNextVideoVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
}
FRAMES_ALONE: dict[str, type[FrameFilms]] = {
    "llava_next_video": NextVideoFilms,
    "llava_onevision": OnevisionFilms,
    "internvl": InternFilms,
}
"""Families that sample a number of frames, which the caller of transformers has to give."""
CAPPED = {name for name in CLASSES if name.startswith("qwen")}

OWN_SETTINGS: dict[str, Any] = {
    "resample": 2,
    "image_mean": [0.3, 0.4, 0.5],
    "image_std": [0.2, 0.25, 0.3],
    "rescale_factor": 1 / 200,
}
"""What a checkpoint may say in a file for films of its own; it takes most from the file for pictures here."""

SIZES = [(2, 112, 112), (4, 320, 120), (5, 61, 90), (7, 640, 480), (3, 20, 30), (12, 200, 333), (9, 1280, 720)]
LENGTHS = [1, 2, 3, 4, 5, 7, 24, 25, 60, 99, 100, 101, 240, 751, 2000, 7499, 9001, 30_000, 72_000, 200_001]
RATES = [0.5, 1.0, 10.0, 23.976, 25.0, 29.97, 30.0, 59.94, 120.0]


class Pair(NamedTuple):
    family: str
    ours: Preprocessor
    theirs: Any


def families() -> list[str]:
    entries = registry.FAMILIES
    return [one.family for one in entries if Modality.VIDEO in adapter_class(one).modalities]


@pytest.fixture(scope="module", params=[(name, own) for name in families() for own in (False, True)], ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import transformers

    family, has_own = request.param
    folder: Path = tmp_path_factory.mktemp(family)
    entry = next(one for one in registry.FAMILIES if one.family == family)
    adapter_class(entry).tiny_checkpoint(folder, seed=0)
    if has_own:
        said = json.loads((folder / "preprocessor_config.json").read_text())
        more = {"num_frames": 6} if family in FRAMES_ALONE else {"fps": 1.5}
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**said, **OWN_SETTINGS, **more}))
    options: dict[str, Any] = {"cap_pixels_per_frame": True} if family in CAPPED else {}
    films: Any = getattr(adapter_class(entry), "films", None)
    if longest := getattr(films, "longest_edge", None):  # of Omni: its whole processor gives it
        options["size"] = {"shortest_edge": longest // 6, "longest_edge": longest}
    theirs = getattr(transformers, CLASSES[family]).from_pretrained(folder, **options)
    return Pair(family, load_preprocessor(folder), theirs)


def theirs_of(pair: Pair, one: Film) -> dict[str, Any]:
    frames = np.stack(one.frames)
    return dict(pair.theirs(videos=[frames], do_sample_frames=False, return_tensors="pt"))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= 1e-6)


@pytest.mark.parametrize(("count", "width", "height"), SIZES, ids=str)
def test_pixels_and_grids_are_equal(pair: Pair, count: int, width: int, height: int) -> None:
    one = film(count, width, height)
    ours, want = pair.ours.preprocess_video(one), theirs_of(pair, one)
    pixels = want["pixel_values" if pair.family == "smolvlm" else "pixel_values_videos"]
    if "video_grid_thw" in want:
        assert ours.tensors["image_grid_thw"].tolist() == want["video_grid_thw"].tolist()
    else:
        pixels = pixels.flatten(0, 1)
    assert close(ours.tensors["pixel_values"], pixels)


def sampled(pair: Pair, info: FilmInfo, fps: float | None = None) -> list[int] | None:
    """What transformers' processor takes of the film; None where it refuses it, as it does with most short ones.

    What a checkpoint need not say is given as a caller would, with our defaults.
    """
    asked: dict[str, Any] = {"fps": fps}
    name = CLASSES[pair.family]
    if kind := FRAMES_ALONE.get(pair.family):
        asked["num_frames"] = None if fps else min(pair.theirs.num_frames or kind.most, info.num_frames)
    if name == "SmolVLMVideoProcessor":
        asked = {"fps": fps or pair.theirs.fps or 1, "num_frames": 64}
    if name == "Qwen2VLVideoProcessor":
        asked["fps"] = fps or pair.theirs.fps or 2.0
    try:
        chosen = [int(index) for index in pair.theirs.sample_frames(metadata_of(info), **asked)]
    except (ValueError, ZeroDivisionError, RuntimeError):
        return None
    # Its sums' rounding adds one beyond the film's end at times, which then fails in transformers.
    return [index for index in chosen if index < info.num_frames] or None


def infos() -> list[FilmInfo]:
    return [
        FilmInfo(num_frames=count, fps=fps, seconds=count / fps, width=64, height=64)
        for count in LENGTHS
        for fps in RATES
        if count / fps <= 7200
    ]


def test_the_same_frames_are_chosen(pair: Pair) -> None:
    compared = 0
    for info in infos():
        if (want := sampled(pair, info)) is not None:
            assert list(pair.ours.choose_frames(info, ItemOptions())) == want, info
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("fps", [0.3, 1.0, 4.0])
def test_the_same_frames_are_chosen_at_a_rate_that_is_asked_for(pair: Pair, fps: float) -> None:
    if pair.family == "glm46v":
        pytest.skip("its processor has rates of its own and ignores the one that it is given")
    if pair.family in FRAMES_ALONE and pair.theirs.num_frames is not None:
        pytest.skip("its processor takes the number before the rate")
    compared = 0
    for info in infos():
        if not 1 <= info.num_frames / info.fps * fps <= min(most_frames(pair), info.num_frames):
            continue  # a request may lower the family's limit, not raise it
        if (want := sampled(pair, info, fps)) is not None:
            assert list(pair.ours.choose_frames(info, ItemOptions(fps=fps))) == want, info
            compared += 1
    assert compared > 20


def most_frames(pair: Pair) -> float:
    if pair.family in FRAMES_ALONE:
        return FRAMES_ALONE[pair.family].most
    if CLASSES[pair.family] == "Glm4vVideoProcessor":
        return float(pair.theirs.max_duration * pair.theirs.fps)
    return math.inf


def features_of(pair: Pair, info: FilmInfo) -> tuple[Features, Any]:
    """Ours of a film of this length, and what transformers knows of it."""
    indices = tuple(pair.ours.choose_frames(info, ItemOptions()))
    times = tuple(index / info.fps for index in indices)
    one = Film(frames=film(len(indices), 64, 64).frames, times=times, indices=indices, info=info)
    metadata = metadata_of(info)
    metadata.frames_indices = list(indices)
    return pair.ours.preprocess_video(one), metadata


@pytest.mark.parametrize(("count", "fps"), [(25, 25.0), (100, 23.976), (751, 29.97), (300, 10.0)])
def test_times_are_equal(pair: Pair, count: int, fps: float) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    info = FilmInfo(num_frames=count, fps=fps, seconds=count / fps, width=64, height=64)
    features, metadata = features_of(pair, info)
    details = features.details
    assert details["sampled_fps"] == pytest.approx(metadata.sampled_fps)
    match CLASSES[pair.family]:
        case "Qwen2VLVideoProcessor":
            wanted = pair.theirs.temporal_patch_size / metadata.sampled_fps
            told = details.get("second_per_grid_ts", details.get("video_second_per_grid"))
            assert pair.family == "qwen2_vl" or told == pytest.approx(wanted)
        case "Qwen3VLVideoProcessor":
            calculate: Any = Qwen3VLProcessor._calculate_timestamps
            wanted = calculate(None, metadata.frames_indices, fps, pair.theirs.temporal_patch_size)
            assert details["timestamps"] == pytest.approx(wanted)
        case "Glm4vVideoProcessor" | "Glm46VVideoProcessor":
            assert details["timestamps"] == pytest.approx(metadata.timestamps[::2])
        case _:
            assert details["timestamps"] == pytest.approx(metadata.timestamps)


def test_every_family_of_films_is_compared() -> None:
    assert set(families()) <= set(CLASSES)
