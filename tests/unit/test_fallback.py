"""What the fallback takes, what it refuses and why, and how its items are priced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode, StartupError
from spmd_encoder.models import registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.checkpoint import SINGLE, resolve_checkpoint
from spmd_encoder.models.fallback_items import FallbackPreprocessor
from spmd_encoder.models.fallback_media import price_pictures
from spmd_encoder.models.fallback_types import modeling_modules
from spmd_encoder.models.loading import adapter_class, load_adapter, load_preprocessor
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA
from tests.harness.clips import sound
from tests.harness.fallback_families import STRANGERS

models: Any = transformers


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("aya_vision", "aya_vision.modeling_aya_vision"),
        ("blip-2", "blip_2.modeling_blip_2"),
        ("kosmos-2.5", "kosmos2_5.modeling_kosmos2_5"),
        ("omniasr", "omniasr.modeling_omniasr"),
    ],
)
def test_a_type_that_transformers_has_features_for_is_found(model_type: str, module: str) -> None:
    assert modeling_modules(model_type) == (f"transformers.models.{module}",)
    entry = registry.find(model_type)
    assert (entry.family, entry.model_types) == ("fallback", (model_type,))
    assert adapter_class(entry).family == "fallback"
    registry.preload(model_type)


@pytest.mark.parametrize("model_type", ["llama", "bert", "videomae", "no-such-model", "", "..", "auto"])
def test_a_type_without_features_is_refused_before_anything_is_loaded(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(StartupError, match="has no model of this type with get_image_features") as caught:
        resolve_checkpoint(str(tmp_path), None, tmp_path)
    assert "supported are: " in caught.value.message and "qwen2_5_vl" in caught.value.message


@pytest.mark.parametrize(("model_type", "why"), registry.NOT_SERVED)
def test_what_is_known_not_to_work_is_not_tried(model_type: str, why: str) -> None:
    with pytest.raises(StartupError) as caught:
        registry.find(model_type)
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        ("Cohere2VisionConfig", {"image_processor_type": "Cohere2VisionImageProcessor"}, "torchvision"),
        ("InstructBlipConfig", {"image_processor_type": "BlipImageProcessor"}, "wants qformer_input_ids"),
        ("FuyuConfig", {"image_processor_type": "FuyuImageProcessor"}, "wants pixel_values"),
        ("VipLlavaConfig", {"image_processor_type": "CLIPImageProcessor"}, "doesn't match model"),
        ("FunAsrNanoConfig", {"feature_extractor_type": "FunAsrNanoFeatureExtractor"}, "torchaudio"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    config: str, processor: dict[str, str], words: str, tmp_path: Path
) -> None:
    getattr(models, config)().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(StartupError, match="the fallback cannot serve model type") as caught:
        load_preprocessor(tmp_path)
    assert words in caught.value.message
    assert "there are families for: " in caught.value.message and "qwen2_5_vl" in caught.value.message


def test_a_missing_processor_is_named(tmp_path: Path, context: LoadContext) -> None:
    adapter_class(registry.FALLBACK).tiny_checkpoint(tmp_path, seed=1)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(StartupError, match="ImageProcessor"):
        load_adapter(tmp_path, context)


def test_a_model_that_draws_at_random_is_refused(tmp_path: Path, context: LoadContext) -> None:
    tower = {"num_filters": 4, "depths": [1] * 7, "hidden_size": 8}
    config = models.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config=tower,
        semantic_tokenizer_encoder_config={**tower, "hidden_size": 16},
        text_config={**TINY_LLAMA, "model_type": "qwen2"},
    )
    extractor = models.VibeVoiceAcousticTokenizerFeatureExtractor()
    write_random(models.VibeVoiceAsrForConditionalGeneration, config, extractor, tmp_path, seed=1)
    with pytest.raises(StartupError, match="gives other values each time"):
        load_adapter(tmp_path, context)


def test_a_sound_is_not_so_long_that_attention_over_all_of_it_takes_most_of_the_work(tmp_path: Path) -> None:
    next(one for one in STRANGERS if one.name == "omniasr").write(tmp_path)
    made = load_preprocessor(tmp_path)
    assert isinstance(made, FallbackPreprocessor)
    longest = made.cost_table().audio
    assert longest is not None and 30 <= longest.max_s < 100

    def work_per_second(seconds: float) -> float:
        inputs = made.preprocess_audio(sound(seconds, made.sampling_rate)).tensors
        return made.model.work(Modality.AUDIO, inputs) / seconds

    assert 3 <= work_per_second(longest.max_s) / work_per_second(0.5) <= 4.2
    with pytest.raises(EncoderError, match="send it in pieces") as caught:
        made.preprocess_audio(sound(longest.max_s + 1, made.sampling_rate))
    assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(("name", "samples"), [("omniasr", 1), ("omniasr", 399), ("gemma4", 100)])
def test_a_sound_that_a_model_has_too_little_of_is_told_so(name: str, samples: int, tmp_path: Path) -> None:
    next(one for one in STRANGERS if one.name == name).write(tmp_path)
    made = load_preprocessor(tmp_path)
    with pytest.raises(EncoderError, match="too short for this model") as caught:
        made.preprocess_audio(sound(samples / made.sampling_rate, made.sampling_rate))
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT
    assert "Error" not in caught.value.message


def test_weights_that_are_missing_are_named(tmp_path: Path, context: LoadContext) -> None:
    adapter_class(registry.FALLBACK).tiny_checkpoint(tmp_path, seed=1)
    weights = load_file(tmp_path / SINGLE)
    weights.pop(next(name for name in weights if "multi_modal_projector" in name and name.endswith("weight")))
    save_file(weights, tmp_path / SINGLE)
    with pytest.raises(StartupError, match=r"lacks 1 weights of the encoder, first .*multi_modal_projector"):
        load_adapter(tmp_path, context)


SIDES = st.integers(1, 4096)


@given(SIDES, SIDES)
def test_one_size_is_one_price(width: int, height: int) -> None:
    assert price_pictures(lambda _: 81).image_tokens(width, height) == 81


# A side of half a patch or less is rounded to nothing, as `smart_resize` does: few pixels, and at least one patch.
NOT_THIN = st.integers(8, 4096)


@given(NOT_THIN, NOT_THIN)
def test_pictures_that_keep_their_size_are_priced_by_area(width: int, height: int) -> None:
    table = price_pictures(lambda size: max(1, size[0] * size[1] // 196))
    assert 4 + 1.5 * table.image_tokens(width, height) >= width * height / 196  # sides are rounded to patches


@given(SIDES, SIDES)
def test_pictures_that_are_scaled_into_bounds_cost_no_more_and_no_less(width: int, height: int) -> None:
    table = price_pictures(lambda size: min(max(size[0] * size[1] // 196, 16), 1024))
    assert 16 <= table.image_tokens(width, height) <= 1024


@given(SIDES, SIDES)
def test_where_area_would_be_too_cheap_all_cost_as_the_dearest(width: int, height: int) -> None:
    table = price_pictures(lambda size: 700 if size[0] != size[1] else 100)
    assert table.image_tokens(width, height) == 700


def test_pictures_that_are_all_refused_have_a_price() -> None:
    assert price_pictures(lambda _: None).image_tokens(10, 10) == 1
