"""Settings of a checkpoint that cannot be used end the start with a sentence, whatever they break."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch.distributed import DistBackendError

from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter, load_preprocessor
from spmd_encoder.models.settings import refuse_absurd_sizes, settings_of

CONFIG, PICTURES, WHOLE = "config.json", "preprocessor_config.json", "processor_config.json"


def change(folder: Path, name: str, where: str, value: Any) -> None:
    """Set the value at the path `where`, written with dots."""
    said = json.loads((folder / name).read_text())
    *parents, last = where.split(".")
    part = said
    for parent in parents:
        part = part[parent]
    part[last] = value
    (folder / name).write_text(json.dumps(said))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint in a folder of its own."""
    root = tmp_path_factory.mktemp("tiny")

    def make(family: str) -> Path:
        made = root / family
        if not made.exists():
            adapter_class(registry.find(family)).tiny_checkpoint(made, seed=3)
        folder = tmp_path_factory.mktemp(family)
        shutil.copytree(made, folder, dirs_exist_ok=True)
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "name", "where", "value"),
    [
        ("clip", CONFIG, "vision_config.patch_size", 0),
        ("clip", CONFIG, "vision_config.patch_size", [14, 14]),
        ("clip", CONFIG, "projection_dim", None),
        ("dinov2", CONFIG, "patch_size", 0),
        ("dinov2", CONFIG, "patch_size", None),
        ("llava", CONFIG, "vision_config.patch_size", 0),
        ("internvl", CONFIG, "vision_config.image_size", []),
        ("internvl", CONFIG, "vision_config.patch_size", [0, 0]),
        ("idefics3", PICTURES, "max_image_size.longest_edge", "x"),
        ("qwen2_5_vl", PICTURES, "patch_size", "x"),
        ("qwen2_5_vl", PICTURES, "merge_size", [1, 2]),
        ("qwen2_5_vl", PICTURES, "size.longest_edge", None),
        ("colqwen2", WHOLE, "image_processor.size.longest_edge", "x"),
        ("colqwen2", WHOLE, "image_processor.rescale_factor", "x"),
        ("colqwen2", WHOLE, "image_processor.image_mean", [0.5, 0.5]),
        ("colqwen2", WHOLE, "visual_prompt_prefix", "bogus"),
    ],
)
def test_settings_that_cannot_be_used_are_one_sentence(
    tiny: Callable[[str], Path], context: LoadContext, family: str, name: str, where: str, value: Any
) -> None:
    folder = tiny(family)
    change(folder, name, where, value)
    with pytest.raises(StartupError) as caught:
        load_adapter(folder, context)
    assert caught.value.message.startswith(str(folder)) and "\n" not in caught.value.message
    assert caught.value.exit_code == 1


def test_the_preparer_is_told_the_same(tiny: Callable[[str], Path]) -> None:
    folder = tiny("clip")
    change(folder, CONFIG, "vision_config.patch_size", 0)
    with pytest.raises(StartupError, match=r"config.json or the processor's file cannot be used \(ZeroDivisionError"):
        load_preprocessor(folder)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("size"), "(KeyError: 'size')"),
        (OverflowError("too large\nsecond line"), "(OverflowError: too large)"),
        (RuntimeError("shapes [8, 2] and [8, 3]"), "(RuntimeError: shapes [8, 2] and [8, 3])"),
        (RecursionError("too deep"), "(RecursionError: too deep)"),
        (EncoderError(ErrorCode.MEDIA_CORRUPT, "a picture cannot be encoded"), "(a picture cannot be encoded)"),
    ],
)
def test_the_error_and_its_first_line_are_told(error: Exception, words: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught, settings_of(tmp_path):
        raise error
    assert words in caught.value.message
    assert caught.value.__cause__ is error, "the traceback of a debug log"


@pytest.mark.parametrize(
    "error", [StartupError("x"), DistBackendError("a peer has gone"), MemoryError(), OSError("disk")]
)
def test_what_trying_again_may_help_stays_as_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, settings_of(tmp_path):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("family", "name", "where", "value"),
    [
        ("clip", PICTURES, "crop_size.height", 10**6),
        ("clip", PICTURES, "size.shortest_edge", 10**9),
        ("idefics3", PICTURES, "size.longest_edge", 10**9),
        ("internvl", PICTURES, "max_patches", 10**9),
        ("qwen2_5_vl", PICTURES, "size.shortest_edge", 10**9),
        ("colqwen2", WHOLE, "image_processor.size.shortest_edge", 10**9),
        ("whisper", PICTURES, "n_fft", 10**9),
        ("clap", PICTURES, "fft_window_size", 10**9),
    ],
)
def test_sizes_that_take_all_memory_are_refused_before_anything_is_made(
    tiny: Callable[[str], Path], family: str, name: str, where: str, value: int
) -> None:
    folder = tiny(family)
    change(folder, name, where, value)
    with pytest.raises(StartupError, match=rf"{name}: {where} is {value}, and at most \d+ can be served"):
        load_preprocessor(folder)


@pytest.mark.parametrize(
    "said",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 234_881_024}},  # Qwen3-VL's films: areas
        {"size": {"shortest_edge": 16_777_216, "longest_edge": 234_881_024}},
        {"min_pixels": 3136, "max_pixels": 12_845_056},
        {"size": {"height": 4096, "width": 4096}, "crop_size": 224, "max_patches": 4096},
        {"image_processor": {"size": None, "crop_size": "x"}, "size": []},
        {"max_image_size": {"longest_edge": 47_040_000}, "temporal_patch_size": 2},  # GLM-V's films: an area
        {"video_processor": {"max_image_size": {"longest_edge": 47_040_000}, "temporal_patch_size": 2}},
        ["no object"],
    ],
)
def test_sizes_of_real_models_are_left_alone(said: Any, tmp_path: Path) -> None:
    (tmp_path / PICTURES).write_text(json.dumps(said))
    (tmp_path / WHOLE).write_text("no JSON")
    refuse_absurd_sizes(tmp_path)


def test_the_default_files_of_all_processors_of_pictures_are_left_alone(tmp_path: Path) -> None:
    names = [name for name in dir(transformers) if name.endswith("ImageProcessorPil")]
    for name in names:
        getattr(transformers, name)().save_pretrained(tmp_path / name)
        refuse_absurd_sizes(tmp_path / name)
    assert len(names) > 60


@pytest.mark.parametrize("patch", [{}, {"patch_size": 14}])
def test_most_tiles_or_patches_of_a_picture(patch: dict[str, int], tmp_path: Path) -> None:
    most = 2**16 if patch else 2**12
    (tmp_path / PICTURES).write_text(json.dumps({**patch, "max_patches": most}))
    refuse_absurd_sizes(tmp_path)
    (tmp_path / PICTURES).write_text(json.dumps({**patch, "max_patches": most + 1}))
    with pytest.raises(StartupError, match=f"max_patches is {most + 1}, and at most {most} can be served"):
        refuse_absurd_sizes(tmp_path)


@pytest.mark.parametrize(
    ("family", "where", "value", "why"),
    [
        ("whisper", "encoder_layers", 10**9, "at most 4096 can be served"),
        ("whisper", "decoder_layers", 10**7, "at most 4096 can be served"),
        ("whisper", "max_source_positions", 10**9, "at most 16777216 can be served"),
        ("whisper", "vocab_size", 10**12, "at most 268435456 can be served"),
        ("dinov2", "hidden_size", 10**9, "at most 16777216 can be served"),
        ("dinov2", "num_attention_heads", -1, "there is no such size"),
        ("qwen2_5_vl", "vision_config.depth", 10**6, "at most 4096 can be served"),
        ("qwen3_vl", "vision_config.depth", 10**9, "at most 4096 can be served"),
        ("dinov3_convnext", "depths", [2, 10**9, 2, 2], "at most 4096 can be served"),
    ],
)
def test_sizes_of_no_model_are_refused_before_it_is_built(
    tiny: Callable[[str], Path], context: LoadContext, family: str, where: str, value: Any, why: str
) -> None:
    folder = tiny(family)
    change(folder, CONFIG, where, value)
    largest = max(value) if isinstance(value, list) else value
    with pytest.raises(StartupError, match=rf"{CONFIG}: {where} is {largest}, and {why}"):
        load_adapter(folder, context)
    with pytest.raises(StartupError, match=where):
        load_preprocessor(folder)


def test_settings_of_real_models_are_left_alone(tmp_path: Path) -> None:
    said = {
        "vocab_size": 290_943,
        "ngram_vocab_size_base": 20_000_000,
        "max_position_embeddings": 10_485_760,
        "chunk_size": -1,
        "window_size": 2**31,
        "vision_feature_layer": -2,
        "out_indices": [-1],
        "max_relative_positions": -1,
        "num_hidden_layers": 128,
        "rope_scaling": None,
        "vision_config": {"depths": [3, 27, 3], "image_size": [1024, 1024], "use_size": True, "size": "large"},
    }
    (tmp_path / CONFIG).write_text(json.dumps(said))
    refuse_absurd_sizes(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("num_attention_heads", 12), ("head_dim", 32)])
def test_heads_that_the_width_of_pixtrals_tower_has_no_room_for(
    tiny: Callable[[str], Path], context: LoadContext, name: str, value: int
) -> None:
    folder = tiny("mistral3")
    change(folder, CONFIG, f"vision_config.{name}", value)
    with pytest.raises(StartupError, match=r"heads of \d+ values .* in a tower of 96 \(hidden_size\)"):
        load_adapter(folder, context)
