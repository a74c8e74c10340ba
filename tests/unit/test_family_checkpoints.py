"""Checkpoints as they are found: in shards, by old names, of the vision half alone, with processors of any age."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spmd_encoder.api.types import OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.models import checkpoint, registry
from spmd_encoder.models.base import LoadContext, TowerOutput
from spmd_encoder.models.checkpoint import check_folder, resolve_checkpoint
from spmd_encoder.models.loading import adapter_class, load_adapter
from tests.harness.samples import features_of, forwards, pictures

models: Any = transformers
VISION_CLASSES = (("clip", "CLIPVisionModel"), ("siglip", "SiglipVisionModel"), ("siglip2", "Siglip2VisionModel"))
WITH_LANGUAGE = [entry for entry in registry.FAMILIES if entry.tower_keys]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for entry in registry.FAMILIES:
        adapter_class(entry).tiny_checkpoint(root / entry.family, seed=0)
    return {entry.family: root / entry.family for entry in registry.FAMILIES}


@pytest.fixture(params=WITH_LANGUAGE, ids=lambda entry: entry.family)
def entry(request: pytest.FixtureRequest) -> registry.FamilyEntry:
    found: registry.FamilyEntry = request.param
    return found


@pytest.fixture
def sharded(entry: registry.FamilyEntry, tiny: dict[str, Path], tmp_path: Path) -> Path:
    """The tiny checkpoint in three shards: two with parts of the tower, one with the language half."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    weights = load_file(tiny[entry.family] / checkpoint.SINGLE)
    tower = sorted(key for key in weights if key.startswith(entry.tower_keys))
    parts = {"a": tower[::2], "b": tower[1::2], "c": sorted(weights.keys() - set(tower))}
    for name, keys in parts.items():
        save_file({key: weights[key] for key in keys}, folder / f"{name}.safetensors")
    index = {"weight_map": {key: f"{name}.safetensors" for name, keys in parts.items() for key in keys}}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(tiny[entry.family] / name, folder)
    return folder


def encode(folder: Path, context: LoadContext) -> TowerOutput:
    adapter = load_adapter(folder, context)
    (out,) = forwards(adapter, features_of(adapter.preprocessor, adapter.modalities[0])[:1])
    assert (out.pooled is not None) == (OutputKind.POOLED in adapter.outputs)
    return out


def same(one: TowerOutput, other: TowerOutput) -> bool:
    """Equal but for rounding, which depends on where in memory a file's tensors happen to lie."""
    pairs = [(one.tokens, other.tokens)]
    if one.pooled is not None and other.pooled is not None:
        pairs.append((one.pooled, other.pooled))
    kinds = (one.pooled is None) == (other.pooled is None)
    return kinds and all(a.shape == b.shape and bool((a - b).abs().max() <= 1e-6 * b.abs().max()) for a, b in pairs)


def test_shards_give_what_one_file_gives_and_the_language_half_may_be_missing(
    entry: registry.FamilyEntry, sharded: Path, tiny: dict[str, Path], context: LoadContext
) -> None:
    (sharded / "c.safetensors").unlink()
    assert same(encode(sharded, context), encode(tiny[entry.family], context))


def test_a_missing_or_corrupt_shard_is_named(sharded: Path, context: LoadContext) -> None:
    shard = sharded / "b.safetensors"
    good = shard.read_bytes()
    for bad in (good[:-100], b"\xff" * 500, b""):
        shard.write_bytes(bad)
        with pytest.raises(StartupError, match=r"b\.safetensors is broken"):
            load_adapter(sharded, context)
    shard.unlink()
    with pytest.raises(StartupError, match=r"lacks the weights file b\.safetensors"):
        load_adapter(sharded, context)


def test_a_missing_weight_of_the_tower_is_named(
    entry: registry.FamilyEntry, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[entry.family], tmp_path / "copy")
    weights = load_file(folder / checkpoint.SINGLE)
    for prefix in {key.split(".")[0] for key in weights if key.startswith(entry.tower_keys)}:
        lost = max(key for key in weights if f"{key}.".startswith(f"{prefix}."))
        save_file({key: value for key, value in weights.items() if key != lost}, folder / checkpoint.SINGLE)
        with pytest.raises(
            StartupError, match=rf"lacks 1 weights of the encoder, first .*{'.'.join(lost.split('.')[-2:])}"
        ):
            load_adapter(folder, context)


def test_the_models_document_lists_every_model_type() -> None:
    table = (Path(__file__).parents[2] / "docs" / "models.md").read_text().partition("## Not served")[0]
    assert not [t for t in registry.supported_model_types() if f"`{t}`" not in table]


def test_pickles_are_refused(entry: registry.FamilyEntry, tiny: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(tiny[entry.family] / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match=r"pytorch_model\.bin, a pickle"):
        check_folder(tmp_path)


def test_the_hub_is_asked_for_the_towers_shards_only(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(sharded)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_checkpoint("some/model", None, sharded)
    single = checkpoint.SINGLE  # which transformers would take, were it there
    assert asked[-1] == ["*.json", "a.safetensors", "b.safetensors", single]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_old_and_new_names_of_the_tower_load(
    family: str, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    weights = load_file(folder / checkpoint.SINGLE)
    tower = {key.removeprefix("model."): value for key, value in weights.items() if "visual." in key}
    for prefix in next(e for e in registry.FAMILIES if e.family == family).tower_keys:
        renamed = {f"{prefix}{key.removeprefix('visual.')}": value for key, value in tower.items()}
        save_file(renamed, folder / checkpoint.SINGLE)
        assert same(encode(folder, context), encode(tiny[family], context)), prefix


@pytest.mark.parametrize(
    ("family", "cls", "prefix"),
    [
        ("clip", "CLIPVisionModelWithProjection", "vision_model."),
        *((family, cls, prefix) for family, cls in VISION_CLASSES for prefix in ("vision_model.", "")),
    ],
)
def test_a_vision_half_alone_loads(
    family: str, cls: str, prefix: str, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    """With and without the prefix that the tower's weights have had in one release or another."""
    config = json.loads((tiny[family] / "config.json").read_text())["vision_config"]
    if family == "clip":
        config["projection_dim"] = 40
    vision = getattr(models, cls)(getattr(models, cls).config_class(**config)).eval()
    vision.save_pretrained(tmp_path)
    shutil.copy(tiny[family] / "preprocessor_config.json", tmp_path)
    weights = load_file(tmp_path / checkpoint.SINGLE)
    projection = {key: weights.pop(key) for key in list(weights) if key.startswith("visual_projection")}
    renamed = {f"{prefix}{key.removeprefix('vision_model.')}": value for key, value in weights.items()}
    save_file(renamed | projection, tmp_path / checkpoint.SINGLE)
    out = encode(tmp_path, context)
    processor = models.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    with torch.inference_mode():
        want = vision(**processor(images=pictures()[0], return_tensors="pt"))
    pooled = want.image_embeds if projection else want.pooler_output
    rows = want.last_hidden_state[0, 1:] if family == "clip" else want.last_hidden_state[0, : len(out.tokens)]
    assert out.pooled is not None
    torch.testing.assert_close(out.pooled, pooled[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.tokens, rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["siglip", "siglip2"])
def test_a_tower_without_its_pooling_head_has_tokens_only(
    family: str, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["vision_use_head"] = False
    (folder / "config.json").write_text(json.dumps(config))
    adapter = load_adapter(folder, context)
    assert (adapter.outputs, adapter.default_output) == ((OutputKind.TOKENS,), OutputKind.TOKENS)
    assert same(encode(folder, context), TowerOutput(tokens=encode(tiny[family], context).tokens))


def test_clips_projection_is_as_wide_as_the_whole_model_says(
    tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny["clip"], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["projection_dim"] = 512
    # The oldest files have the vision half under this name, which wins.
    config["vision_config_dict"] = config.pop("vision_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert load_adapter(folder, context).embedding_dims == {OutputKind.TOKENS: 48, OutputKind.POOLED: 40}
    assert same(encode(folder, context), encode(tiny["clip"], context))


PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    # As the first checkpoint of CLIP has it: sizes are numbers.
    ("clip", {"size": 112, "crop_size": 112, "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3}),
    ("clip", {"image_processor_type": "CLIPImageProcessorFast"}),
    ("siglip", {"image_processor_type": "SiglipImageProcessor", "processor_class": "SiglipProcessor"}),
    ("siglip2", {"image_processor_type": "Siglip2ImageProcessorFast", "do_convert_rgb": None}),
    # As Qwen2-VL has it: limits of pixels beside no size.
    ("qwen2_vl", {"size": None, "min_pixels": 3136, "max_pixels": 1003520, "processor_class": "Qwen2VLProcessor"}),
    ("qwen3_vl", {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}),
    ("llava", {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}),
    ("llava", {"image_processor_type": "LlavaImageProcessorFast", "do_pad": False}),
    ("llava_next", {"image_processor_type": "LlavaNextImageProcessor", "aspect_ratio_setting": "anyres"}),
    ("llava_onevision", {"image_processor_type": "LlavaOnevisionImageProcessorFast", "do_pad": True}),
    ("internvl", {"image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False}),
    ("mistral3", {"image_processor_type": "PixtralImageProcessor", "patch_size": 14}),
    ("gemma3", {"image_processor_type": "Gemma3ImageProcessorFast", "processor_class": "Gemma3Processor"}),
    ("paligemma", {"image_processor_type": "SiglipImageProcessor", "image_seq_length": 64}),
    ("idefics3", {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True}),
    ("glm4v", {"image_processor_type": "Glm4vImageProcessorFast", "processor_class": "Glm4vProcessor"}),
    ("minicpmv4_6", {"image_processor_type": "MiniCPMV4_6ImageProcessor", "slice_mode": True}),
]


@pytest.mark.parametrize(("family", "edits"), PROCESSORS)
def test_processors_load_by_the_names_and_fields_that_real_checkpoints_have(
    family: str, edits: dict[str, Any], tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    if "feature_extractor_type" in edits:
        del settings["image_processor_type"]
    settings = {key: value for key, value in (settings | edits).items() if value is not None}
    path.write_text(json.dumps(settings))
    assert same(encode(folder, context), encode(tiny[family], context))
    # Newer releases of transformers save all of a model's processors in one file.
    path.unlink()
    whole = {"image_processor": settings, "processor_class": "SomeProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert same(encode(folder, context), encode(tiny[family], context))


@pytest.mark.parametrize(
    ("family", "edits", "words"),
    [
        ("clip", {"crop_size": {"height": 224, "width": 224}}, "224 x 224 pixels, but config.json asks for 112 x 112"),
        ("siglip", {"size": {"height": 64, "width": 100}}, "100 x 64 pixels, but config.json asks for 100 x 100"),
        ("clip", {"do_center_crop": False}, "does not bring pictures to one size"),
        ("siglip", {"do_resize": False}, "does not bring pictures to one size"),
        ("dinov3_vit", {"do_center_crop": True}, "do_center_crop = True is not supported"),
        ("dinov3_vit", {"size": {"shortest_edge": 224}}, "settings of DINOv3ViTImageProcessor cannot be read"),
        ("siglip2", {"patch_size": 14}, "patches of 14 pixels, but config.json asks for 16"),
        ("qwen3_vl", {"patch_size": 14}, r"\(14, 2, 2\), but config.json asks for \(16, 2, 2\)"),
        (
            "llava_next",
            {"image_grid_pinpoints": [[112, 112]]},
            "image_grid_pinpoints of preprocessor_config.json and of",
        ),
        ("internvl", {"size": {"height": 112, "width": 56}}, "56 x 112 pixels, but config.json asks for 112 x 112"),
        ("minicpmv4_6", {"downsample_mode": "4x"}, "config.json asks for .14, '16x'"),
    ],
)
def test_a_processor_that_does_not_fit_the_tower_is_refused(
    family: str, edits: dict[str, Any], words: str, tiny: dict[str, Path], tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(tiny[family], tmp_path / "copy")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edits))
    with pytest.raises(StartupError, match=words):
        load_adapter(folder, context)
