"""A language model that gets our rows, and hears no sound, says what the whole model says of sounds, with pictures and
films between them where it takes those."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor

from spmd_encoder.api.types import Modality
from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from tests.harness.clips import film, sound
from tests.harness.families import WholeModel
from tests.harness.samples import forwards
from tests.harness.sound_families import WholeSoundModel

TOLERANCE = 1e-5
"""Largest difference of a logit over the largest logit. The language model adds its rounding to the tower's."""
LENGTHS_S = (1.2, 1.9)
STARTS = {Modality.IMAGE: 62, Modality.VIDEO: 62, Modality.AUDIO: 57}
ENDS = {Modality.IMAGE: 63, Modality.VIDEO: 63, Modality.AUDIO: 58}
PLACEHOLDERS = {Modality.IMAGE: 60, Modality.VIDEO: 61, Modality.AUDIO: 59}


@dataclass(frozen=True)
class Prompt:
    """`ids` `[1, tokens]` with the placeholders of `items`, text before, between and after them."""

    ids: Tensor
    items: list[Features]

    @classmethod
    def of(cls, items: list[Features], placeholders: dict[Modality, int]) -> Prompt:
        ids = [1, 5]
        for item in items:
            kind = item.modality
            ids += [STARTS[kind], *[placeholders[kind]] * item.num_tokens, ENDS[kind], 9]
        return cls(torch.tensor([[*ids, 11, 7]]), items)

    def rows(self, adapter: FamilyAdapter) -> list[Tensor]:
        """Each item's, out of batches that have them the other way around."""
        return [out.tokens for out in forwards(adapter, self.items[::-1])][::-1]

    def all(self, modality: Modality, name: str) -> Any:
        """Of the items of one modality, a detail, or the grid."""
        items = [item for item in self.items if item.modality is modality]
        return torch.tensor([item.grid if name == "grid" else item.details[name] for item in items])


def prepare(family: str, folder: Path, context: LoadContext) -> FamilyAdapter:
    entry = next(entry for entry in registry.FAMILIES if entry.family == family)
    adapter_class(entry).tiny_checkpoint(folder, seed=4)
    return load_adapter(folder, context)


def heard(adapter: FamilyAdapter, whole: WholeSoundModel) -> tuple[list[Features], dict[str, Tensor]]:
    """Our features of two sounds, and the whole model's inputs: each sound's as if it were alone, side by side."""
    sounds = [sound(seconds, adapter.preprocessor.sampling_rate) for seconds in LENGTHS_S]
    options = {"padding": True, "truncation": False} if adapter.family == "qwen3_omni_moe" else {}
    made = [
        whole.extractor(one.samples, sampling_rate=one.rate, return_tensors="pt", return_attention_mask=True, **options)
        for one in sounds
    ]
    frames = max(one["input_features"].shape[-1] for one in made)

    def side_by_side(name: str) -> Tensor:
        return torch.cat([F.pad(one[name], (0, frames - one[name].shape[-1])) for one in made])

    inputs = {
        "input_features": side_by_side("input_features"),
        "feature_attention_mask": side_by_side("attention_mask"),
    }
    return [adapter.preprocessor.preprocess_audio(one) for one in sounds], inputs


def check(got: Tensor, want: Tensor, other: Tensor) -> None:
    """`other` is what rows in another order give: it would be seen."""
    largest = float(want.abs().max())
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= TOLERANCE * largest
    assert float((other - want).abs().max()) > 1e-2 * largest


def test_qwen2_audio(tmp_path: Path, context: LoadContext) -> None:
    adapter = prepare("qwen2_audio", tmp_path, context)
    whole = WholeSoundModel("qwen2_audio", tmp_path)
    model = whole.model
    features, inputs = heard(adapter, whole)
    prompt = Prompt.of(features, {Modality.AUDIO: 60})
    places = prompt.ids == 60

    def answer(rows: list[Tensor]) -> Tensor:
        embeds = model.get_input_embeddings()(prompt.ids)
        embeds[places] = torch.cat(rows)
        hidden = model.model.language_model(inputs_embeds=embeds).last_hidden_state
        logits: Tensor = model.lm_head(hidden)
        return logits

    with torch.inference_mode():
        rows = prompt.rows(adapter)
        want = model(input_ids=prompt.ids, attention_mask=torch.ones_like(prompt.ids), **inputs).logits
        check(answer(rows), want, answer(rows[::-1]))


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_thinker_with_a_picture_a_film_and_sounds(family: str, tmp_path: Path, context: LoadContext) -> None:
    adapter = prepare(family, tmp_path, context)
    model = WholeModel(family, tmp_path).model
    sounds, inputs = heard(adapter, WholeSoundModel(family, tmp_path))
    photos: Any = skimage.data
    picture = adapter.preprocess(Image.fromarray(photos.chelsea()).resize((120, 90)))
    clip = adapter.preprocessor.preprocess_video(film(4, 84, 60))
    prompt = Prompt.of([sounds[0], picture, clip, sounds[1]], PLACEHOLDERS)
    grids = {"image_grid_thw": prompt.all(Modality.IMAGE, "grid"), "video_grid_thw": prompt.all(Modality.VIDEO, "grid")}
    seconds = prompt.all(Modality.VIDEO, "video_second_per_grid")
    mask = torch.ones_like(prompt.ids)

    def answer(rows: list[Tensor]) -> Tensor:
        embeds = model.get_input_embeddings()(prompt.ids)
        width = embeds.shape[-1]
        seen = [row for row, item in zip(rows, prompt.items, strict=True) if item.modality is not Modality.AUDIO]
        embeds[torch.isin(prompt.ids, torch.tensor([59, 60, 61]))] = torch.cat([row[:, :width] for row in rows])
        lengths = prompt.all(Modality.AUDIO, "audio_feature_length")
        positions, _ = model.model.get_rope_index(
            prompt.ids, **grids, attention_mask=mask, audio_seqlens=lengths, second_per_grids=seconds
        )
        options: dict[str, Any] = {}
        if seen[0].shape[-1] > width:
            places = torch.isin(prompt.ids, torch.tensor([60, 61]))
            levels = list(torch.split(torch.cat(seen)[:, width:], width, dim=-1))
            options = {"visual_pos_masks": places, "deepstack_visual_embeds": levels}
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=positions, **options).last_hidden_state
        logits: Tensor = model.lm_head(hidden)
        return logits

    with torch.inference_mode():
        rows = prompt.rows(adapter)
        want = model(
            input_ids=prompt.ids,
            attention_mask=mask,
            **inputs,
            pixel_values=picture.tensors["pixel_values"],
            pixel_values_videos=clip.tensors["pixel_values"],
            **grids,
            video_second_per_grid=seconds,
        ).logits
        check(answer(rows), want, answer([row.flip(0) for row in rows]))
