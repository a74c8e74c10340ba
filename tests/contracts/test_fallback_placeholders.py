"""The fallback, which makes no whole processor, promises as many rows as that one writes placeholders into a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.models.loading import load_preprocessor
from tests.harness.clips import sound
from tests.harness.fallback_families import STRANGERS

models: Any = transformers
BY_NAME = {stranger.name: stranger for stranger in STRANGERS}
_TILES = tuple(f"TILE_{number}" for number in range(1, 13))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`text` asks for one item; the whole processor writes `placeholder` for each row. `words` are its tokens."""

    name: str
    whole: Callable[[Any, Any], Any]
    words: tuple[str, ...]
    text: str
    placeholder: str


PROMPTS = (
    Prompt(
        name="aya_vision",
        whole=lambda part, words: models.AyaVisionProcessor(
            image_processor=part, tokenizer=words, patch_size=14, img_size=112, downsample_factor=2
        ),
        words=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL", *_TILES),
        text="<image>",
        placeholder="<|IMG_PATCH|>",
    ),
    Prompt(
        name="idefics2",
        whole=lambda part, words: models.Idefics2Processor(image_processor=part, tokenizer=words, image_seq_len=5),
        words=("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
        text="<image>",
        placeholder="<image>",
    ),
    Prompt(
        name="chameleon",
        whole=lambda part, words: models.ChameleonProcessor(
            image_processor=part, tokenizer=words, image_seq_length=1024
        ),
        words=("<image>", "<racm3:break>", "<eoss>"),
        text="<image>",
        placeholder="<image>",
    ),
    Prompt(
        name="omniasr",
        whole=lambda part, words: models.OmniASRProcessor(feature_extractor=part, tokenizer=words),
        words=("<extra_id_1>",),
        text="<extra_id_1>",
        placeholder="<extra_id_1>",
    ),
)


def tokenizer(words: tuple[str, ...]) -> Any:
    """It knows these words alone."""
    library: Any = tokenizers
    known = {word: number for number, word in enumerate(["<unk>", "<pad>", *words])}
    made = library.Tokenizer(library.models.WordLevel(known, unk_token="<unk>"))
    return models.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=list(words)
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_rows_and_placeholders_are_as_many(prompt: Prompt, tmp_path: Path) -> None:
    stranger = BY_NAME[prompt.name]
    stranger.write(tmp_path)
    ours = load_preprocessor(tmp_path)
    ((modality, part),) = stranger.processors().items()
    whole = prompt.whole(part, tokenizer(prompt.words))
    for size in ((300, 200), (64, 64), (1000, 333)):
        if modality is Modality.IMAGE:
            picture = Image.effect_noise(size, 64).convert("RGB")
            promised = ours.preprocess(picture).num_tokens
            made = whole(images=[picture], text=prompt.text, return_tensors="pt")
        else:
            heard = sound(size[0] / 300, ours.sampling_rate)
            promised = ours.preprocess_audio(heard).num_tokens
            made = whole(audio=[heard.samples], text=prompt.text, return_tensors="pt", sampling_rate=heard.rate)
        written = made["input_ids"][0].tolist().count(whole.tokenizer.convert_tokens_to_ids(prompt.placeholder))
        assert written == promised > 0, size
