"""A checkpoint's settings of films: obeyed, or films are refused at the start and its pictures served.

`tests/compat/test_film_settings.py` holds all of them beside transformers' own video processors.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from spmd_encoder.api.types import ItemOptions, MediaItem, Modality
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.media.base import FilmInfo
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext, Preprocessor
from spmd_encoder.models.film_settings import FilmSettings, SettingError
from spmd_encoder.models.loading import adapter_class, load_adapter, load_preprocessor, served_modalities
from spmd_encoder.models.video import FramePixels, centre
from tests.harness.clips import film

FILMS, PICTURES, WHOLE = "video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json"
PIXELS = {"do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
INFO = FilmInfo(num_frames=40, fps=24.0, seconds=40 / 24, width=160, height=120)

Changed = Callable[..., Path]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    """A family's checkpoint with changes in a file for films of its own."""
    root = tmp_path_factory.mktemp("tiny")

    def make(family: str, **change: Any) -> Path:
        made = root / family
        if not made.exists():
            adapter_class(registry.find(family)).tiny_checkpoint(made, seed=3)
        folder = tmp_path_factory.mktemp(family)
        shutil.copytree(made, folder, dirs_exist_ok=True)
        said = json.loads((folder / PICTURES).read_text())
        (folder / FILMS).write_text(json.dumps({**said, **change}))
        return folder

    return make


def chosen(preprocessor: Preprocessor, info: FilmInfo = INFO, **options: Any) -> list[int]:
    return list(preprocessor.choose_frames(info, ItemOptions(**options)))


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        ("qwen2_5_vl", {"temporal_patch_size": 4}, "sizes (14, 2, 4), but config.json asks for (14, 2, 2)"),
        ("qwen2_5_vl", {"patch_size": 16}, "sizes (16, 2, 2), but"),
        ("qwen2_5_vl", {"merge_size": 3}, "sizes (14, 3, 2), but"),
        ("qwen2_vl", {"patch_size": 0}, "patch_size is 0"),
        ("qwen2_vl", {"do_resize": False}, "do_resize is off"),
        ("qwen2_vl", {"image_std": [0, 0, 0]}, "image_std has a 0"),
        ("qwen2_vl", {"num_frames": 10**9}, "num_frames is 1000000000, and not a whole number from 1 to 65536"),
        ("qwen2_vl", {"fps": float("nan")}, "fps is NaN"),
        ("qwen3_vl", {"resample": 7}, "resample is 7"),
        ("qwen3_vl", {"size": {"shortest_edge": "x", "longest_edge": 1}}, 'size.shortest_edge is "x"'),
        ("qwen2_5_omni", {"merge_size": 1}, "sizes (14, 1, 2), but"),
        ("glm4v", {"fps": None}, "fps is null"),
        ("glm46v", {"temporal_patch_size": 1}, "sizes (14, 2, 1), but"),
        ("llava_next_video", {"do_center_crop": False}, "different sizes, but config.json asks for 112"),
        ("llava_onevision", {"do_resize": False}, "different sizes, but config.json asks for 112"),
        ("llava_next_video", {"size": {"shortest_edge": 5000}}, "at most 4096 pixels per side"),
        ("internvl", {"initial_shift": -1}, "initial_shift is -1"),
        ("smolvlm", {"do_resize": False}, "do_resize is off"),
        ("smolvlm", {"max_image_size": {"longest_edge": 56}}, "(56, 56), but config.json asks for 112"),
    ],
)
def test_films_are_refused_at_the_start_and_pictures_served(
    family: str,
    change: dict[str, Any],
    why: str,
    changed: Changed,
    context: LoadContext,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = changed(family, **change)
    adapter = load_adapter(folder, context)
    with caplog.at_level(logging.WARNING):
        assert Modality.VIDEO not in served_modalities(adapter)
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("spmd_encoder")]
    assert line.startswith("no video is offered: ") and FILMS in line and why in line and "\n" not in line
    adapter.preprocess(Image.new("RGB", (120, 90)))
    price = adapter.cost_table().tokens(MediaItem(modality=Modality.VIDEO, data=b"", digest="", seconds=9.0))
    assert price == 1
    for act in (lambda: chosen(adapter.preprocessor), lambda: adapter.preprocessor.preprocess_video(film(2, 64, 64))):
        with pytest.raises(EncoderError) as caught:
            act()
        assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED and why in caught.value.message


def test_a_number_of_frames_goes_before_a_rate(changed: Changed) -> None:
    qwen2 = load_preprocessor(changed("qwen2_vl", num_frames=9, fps=2))
    assert chosen(qwen2) == [0, 5, 10, 15, 20, 25, 30, 35]  # 9 is rounded to layers of two
    assert chosen(qwen2, max_frames=4) == [0, 10, 20, 30]
    assert chosen(qwen2, fps=1.2) == [0, 20]
    assert len(chosen(qwen2, fps=24.0)) == 8
    assert chosen(qwen2, FilmInfo(num_frames=3, fps=24.0, seconds=1 / 8, width=9, height=9)) == [0, 1, 2]
    qwen3 = load_preprocessor(changed("qwen3_vl", num_frames=5))
    assert chosen(qwen3) == [0, 10, 20, 29, 39]
    video = qwen3.cost_table().video
    assert video is not None and [video.frames(s, ItemOptions()) for s in (0.5, 100.0)] == [5, 5]


def test_qwen3_takes_all_frames_where_the_rate_is_null(changed: Changed) -> None:
    preprocessor = load_preprocessor(changed("qwen3_vl", fps=None, max_frames=50))
    assert chosen(preprocessor) == list(range(40))
    assert len(chosen(preprocessor, FilmInfo(num_frames=400, fps=24.0, seconds=16.7, width=9, height=9))) == 50
    assert chosen(preprocessor, FilmInfo(num_frames=2, fps=24.0, seconds=0.1, width=9, height=9)) == [0, 0, 1, 1]
    assert chosen(preprocessor, fps=1.2) == [0, 13, 26, 39]


def test_qwen2_has_its_usual_rate_where_nothing_is_said(changed: Changed) -> None:
    assert chosen(load_preprocessor(changed("qwen2_vl", fps=None, num_frames=None))) == [0, 10, 20, 30]


def test_frames_families_take_as_many_as_the_checkpoints_rate_gives(changed: Changed) -> None:
    long = FilmInfo(num_frames=2400, fps=24.0, seconds=100.0, width=9, height=9)
    assert len(chosen(load_preprocessor(changed("llava_onevision", fps=1)), long)) == 100
    assert len(chosen(load_preprocessor(changed("llava_onevision")), long)) == 32
    assert len(chosen(load_preprocessor(changed("llava_onevision")), long, fps=1.0)) == 32


def test_internvl_begins_at_the_first_frame_of_films_that_are_shorter_than_its_shift(changed: Changed) -> None:
    preprocessor = load_preprocessor(changed("internvl", initial_shift=50, num_frames=4))
    assert chosen(preprocessor) == [0, 10, 20, 30]


def test_llava_next_video_crops_frames_that_are_not_resized(changed: Changed) -> None:
    crop = {"do_center_crop": True, "do_resize": False, "do_normalize": False, "do_rescale": False}
    preprocessor = load_preprocessor(changed("llava_next_video", **crop))
    one = film(1, 212, 60)
    (got,) = preprocessor.preprocess_video(one).tensors["pixel_values"]
    assert got.shape == (3, 112, 112)
    assert torch.equal(got[:, 26:86].byte(), torch.from_numpy(one.frames[0].copy()).permute(2, 0, 1)[..., 50:162])
    assert not got[:, :26].any() and not got[:, 86:].any()


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [((3, 7), [0, 1, 2], [1, 2, 3, 4]), ((5, 2), [0, 1, 2, 3], [0, 1]), ((7, 6), [1, 2, 3, 4], [1, 2, 3, 4])],
)
def test_where_frames_lie_when_they_are_cropped_or_padded(
    size: tuple[int, int], rows: list[int], columns: list[int]
) -> None:
    made = centre(torch.ones(1, 1, 4, 4), *size)[0, 0]
    assert made.shape == size
    assert made.any(1).nonzero().flatten().tolist() == rows
    assert made.any(0).nonzero().flatten().tolist() == columns


def test_one_value_for_all_channels() -> None:
    frames = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
    pixels = FramePixels(FilmSettings({**PIXELS, "image_mean": 0.1, "image_std": [0.5]}))
    assert torch.allclose(pixels.normalised(frames), torch.tensor(0.2))


@pytest.mark.parametrize(
    ("rescales", "normalises", "want"),
    [(True, True, 0.2), (False, True, 101.8), (True, False, 0.2), (False, False, 51.0)],
)
def test_switches_of_pixels(rescales: bool, normalises: bool, want: float) -> None:
    said = {**PIXELS, "image_mean": 0.1, "image_std": 0.5, "do_rescale": rescales, "do_normalize": normalises}
    frames = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
    assert torch.allclose(FramePixels(FilmSettings(said)).normalised(frames), torch.tensor(want))


def test_the_nearest_pixel_is_taken_where_the_filter_is_0() -> None:
    frames = torch.arange(4, dtype=torch.uint8).view(1, 1, 1, 4)
    pixels = FramePixels(FilmSettings({**PIXELS, "resample": 0, "image_mean": 0, "image_std": 1}))
    assert pixels.resized(frames, 1, 2).flatten().tolist() == [1, 3]


@pytest.mark.parametrize(
    ("value", "square", "want"), [(9, True, {"height": 9, "width": 9}), (9, False, {"shortest_edge": 9})]
)
def test_a_size_may_be_one_number(value: int, square: bool, want: dict[str, int]) -> None:
    assert FilmSettings({"size": value, "default_to_square": square}).size("size") == want


@pytest.mark.parametrize(
    "value", [None, "x", {}, {"height": 3}, [], True, {"height": 0, "width": 3}, {"shortest_edge": 1.5}]
)
def test_what_is_no_size(value: Any) -> None:
    with pytest.raises(SettingError, match=r"^size"):
        FilmSettings({"size": value, "default_to_square": True}).size("size")


@pytest.mark.parametrize("value", [None, True, "2", 0, -1, 2.5, float("inf"), 2**40])
def test_what_is_no_whole_number(value: Any) -> None:
    with pytest.raises(SettingError, match=r"merge_size is .* whole number from 1 to"):
        FilmSettings({"merge_size": value}).whole("merge_size")


def test_the_file_of_all_processors_goes_first(tmp_path: Path) -> None:
    for name, said, fps in (
        (PICTURES, {"fps": 1, "max_frames": 1}, 1),
        (FILMS, {"fps": 2}, 2),
        (WHOLE, {"image_processor": {"fps": 3}, "video_processor": {"fps": 4, "min_frames": None}}, 4),
    ):
        (tmp_path / name).write_text(json.dumps(said))
        settings = FilmSettings.read(tmp_path, {"fps": 9, "min_frames": 9, "max_frames": 9})
        assert (settings.get("fps"), settings.file) == (fps, name)
    assert (settings.get("min_frames"), settings.get("max_frames")) == (None, 9)


@pytest.mark.parametrize("said", ["[1]", "no JSON", '"x"', "3"])
def test_a_file_that_is_no_object_ends_the_start(said: str, tmp_path: Path) -> None:
    (tmp_path / FILMS).write_text(said)
    with pytest.raises(StartupError, match=f"{FILMS} is not a JSON object"):
        FilmSettings.read(tmp_path, {})
