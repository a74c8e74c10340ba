"""Vision-language checkpoints as they are found: names of any age, other towers than usual, pictures of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext, TowerOutput
from spmd_encoder.models.checkpoint import SINGLE
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.loading import adapter_class, load_adapter
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA, VisionLanguageAdapter
from tests.harness.families import WholeModel

models: Any = transformers
ENTRIES = {entry.family: entry for entry in registry.FAMILIES}
FAMILIES = [entry for entry in registry.FAMILIES if issubclass(adapter_class(entry), VisionLanguageAdapter)]
TILED = ["llava_next", "llava_onevision", "internvl", "idefics3", "mistral3", "minicpmv4_6", "glm4v"]
SIZES = [(1, 1), (200, 1), (1, 200), (7, 900), (1000, 30), (336, 336), (337, 335), (112, 111), (640, 480), (61, 340)]


def picture(width: int = 300, height: int = 200) -> Image.Image:
    return Image.fromarray(skimage.data.chelsea()).resize((width, height))


def encode(folder: Path, context: LoadContext, images: list[Image.Image]) -> list[TowerOutput]:
    adapter = load_adapter(folder, context)
    with torch.inference_mode():
        return adapter.forward(adapter.pack([adapter.preprocess(image) for image in images]))


def close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= 1e-6 * want.abs().max())


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.family)
def test_names_of_any_age_load_and_are_known_to_a_download(
    entry: registry.FamilyEntry, tmp_path: Path, context: LoadContext
) -> None:
    adapter_class(entry).tiny_checkpoint(tmp_path, seed=1)
    (want,) = encode(tmp_path, context, [picture()])
    saved = load_file(tmp_path / SINGLE)
    whole = WholeModel(entry.family, tmp_path).model.state_dict()
    newest = {name: tensor.clone() for name, tensor in whole.items()}
    # CLIP's and SigLIP's towers were a level deeper before transformers 5.
    oldest = {name.replace("vision_tower.e", "vision_tower.vision_model.e"): value for name, value in saved.items()}
    oldest = {name.replace("vision_tower.p", "vision_tower.vision_model.p"): value for name, value in oldest.items()}
    has_that_level = entry.family in ("llava", "llava_next", "llava_onevision", "gemma3", "paligemma")
    for weights in (saved, newest, *([oldest] if has_that_level else [])):
        tower = {name: tensor for name, tensor in weights.items() if name.startswith(entry.tower_keys)}
        save_file(tower, tmp_path / SINGLE)
        (got,) = encode(tmp_path, context, [picture()])
        assert close(got.tokens, want.tokens)


@pytest.mark.parametrize("family", TILED)
def test_pictures_of_any_size_have_the_rows_and_the_price_that_were_promised(
    family: str, tmp_path: Path, context: LoadContext
) -> None:
    adapter_class(ENTRIES[family]).tiny_checkpoint(tmp_path, seed=1)
    adapter = load_adapter(tmp_path, context)
    whole = WholeModel(family, tmp_path)
    table = adapter.cost_table()
    features = [adapter.preprocess(picture(*size)) for size in SIZES]
    with torch.inference_mode():
        outputs = adapter.forward(adapter.pack(features))
    for size, item, out in zip(SIZES, features, outputs, strict=True):
        tokens, _ = whole.encode(picture(*size))
        assert len(out.tokens) == item.num_tokens == len(tokens), size
        assert close(out.tokens, tokens), size
        if table.tiling is not None and table.tiling.rule != "slices":  # these have tiles of one size
            assert table.image_tokens(*size) == item.cost, size


@pytest.mark.parametrize(
    ("vision", "processor", "strategy"),
    [
        (
            {"model_type": "pixtral", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
             "intermediate_size": 100, "head_dim": 16, "image_size": 224, "patch_size": 14},
            ("PixtralImageProcessorPil", {"size": {"longest_edge": 224}, "patch_size": {"height": 14, "width": 14}}),
            "full",
        ),
        (
            {**TINY_VISION, "model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14},
            ("SiglipImageProcessorPil", {"size": {"height": 112, "width": 112}}),
            "full",
        ),
        (
            {**TINY_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
            ("CLIPImageProcessorPil", {"size": {"shortest_edge": 112}, "crop_size": {"height": 112, "width": 112}}),
            "full",
        ),
    ],
    ids=["pixtral", "siglip", "clip-with-class-token"],
)  # fmt: skip
def test_llava_over_other_towers(
    vision: dict[str, Any], processor: tuple[str, dict[str, Any]], strategy: str, tmp_path: Path, context: LoadContext
) -> None:
    name, settings = processor
    config = models.LlavaConfig(
        vision_config=vision,
        text_config=TINY_LLAMA,
        image_token_index=60,
        vision_feature_layer=-1,
        vision_feature_select_strategy=strategy,
    )
    write_random(models.LlavaForConditionalGeneration, config, getattr(models, name)(**settings), tmp_path, seed=2)
    whole = WholeModel("llava", tmp_path)
    images = [picture(), picture(90, 224), picture(1, 1)]
    for image, out in zip(images, encode(tmp_path, context, images), strict=True):
        assert close(out.tokens, whole.encode(image)[0]), image.size


def test_a_tower_that_is_not_known_is_named(tmp_path: Path, context: LoadContext) -> None:
    config = models.LlavaConfig(
        vision_config={"model_type": "dinov2", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 112, "patch_size": 14},
        text_config=TINY_LLAMA,
        image_token_index=60,
    )  # fmt: skip
    processor = models.CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
    write_random(models.LlavaForConditionalGeneration, config, processor, tmp_path, seed=2)
    with pytest.raises(StartupError, match="vision tower of type 'dinov2'"):
        load_adapter(tmp_path, context)


@pytest.mark.parametrize(("model_type", "why"), registry.NOT_SERVED)
def test_what_cannot_be_served_is_refused_with_the_reason(model_type: str, why: str) -> None:
    with pytest.raises(StartupError) as caught:
        registry.find(model_type)
    assert f"model type '{model_type}' is not supported here ({why})" in caught.value.message


def test_gemma3_with_pan_and_scan(tmp_path: Path, context: LoadContext) -> None:
    adapter_class(ENTRIES["gemma3"]).tiny_checkpoint(tmp_path, seed=1)
    processor = models.Gemma3ImageProcessorPil(
        size={"height": 112, "width": 112},
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=64,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    processor.save_pretrained(tmp_path)
    whole = WholeModel("gemma3", tmp_path)
    images = [picture(400, 100), picture(100, 100), picture(100, 260)]
    outputs = encode(tmp_path, context, images)
    assert [len(out.tokens) // 16 for out in outputs] == [5, 1, 4]
    for image, out in zip(images, outputs, strict=True):
        assert close(out.tokens, whole.encode(image)[0]), image.size


def test_internvl_without_norms_of_queries(tmp_path: Path, context: LoadContext) -> None:
    """As InternViT-300M, which most InternVL models have."""
    vision = {**TINY_VISION, "image_size": [112, 112], "patch_size": [14, 14], "norm_type": "layer_norm"}
    config = models.InternVLConfig(vision_config=vision, text_config=TINY_LLAMA, image_token_id=60)
    processor = models.GotOcr2ImageProcessorPil(size={"height": 112, "width": 112}, max_patches=4)
    write_random(models.InternVLForConditionalGeneration, config, processor, tmp_path, seed=2)
    (out,) = encode(tmp_path, context, [picture()])
    assert close(out.tokens, WholeModel("internvl", tmp_path).encode(picture())[0])


def test_a_picture_whose_tiles_scale_down_to_nothing_is_refused_with_a_reason(
    tmp_path: Path, context: LoadContext
) -> None:
    config = models.LlavaOnevisionConfig(
        vision_config={**TINY_VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        text_config=TINY_LLAMA,
        image_grid_pinpoints=[[28, 28], [28, 280], [280, 28]],
        vision_aspect_ratio="anyres_max_1",
    )
    processor = models.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=config.image_grid_pinpoints
    )
    write_random(models.LlavaOnevisionForConditionalGeneration, config, processor, tmp_path, seed=2)
    with pytest.raises(EncoderError, match="3000 x 300 pixels cannot be encoded: its shorter side") as caught:
        encode(tmp_path, context, [picture(3000, 300)])
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT
