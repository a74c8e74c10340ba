"""A language model that gets our rows, and never sees the picture, says what the whole model says of the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image
from torch import Tensor

from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter
from tests.harness.families import WholeModel

TOLERANCE = 1e-5
"""Largest difference of a logit over the largest logit. The language model adds its rounding to the tower's."""
IMAGE = 60
"""The placeholder in the prompts of tiny checkpoints."""


def pictures() -> list[Image.Image]:
    """Of unequal sizes: their rows must not be mixed up."""
    return [
        Image.fromarray(skimage.data.chelsea()).resize((120, 180)),
        Image.fromarray(skimage.data.astronaut()).resize((160, 90)),
    ]


def prompt(features: list[Features]) -> Tensor:
    """`[1, tokens]`: text, the first picture's placeholders, text, those of the second, text."""
    ids = [1, 5, 62, *[IMAGE] * features[0].num_tokens, 63, 9, 4, 62, *[IMAGE] * features[1].num_tokens, 63, 11, 7]
    return torch.tensor([ids])


def ours(adapter: FamilyAdapter, features: list[Features]) -> Tensor:
    """All pictures' rows in the prompt's order, out of a batch that has them the other way around."""
    outputs = adapter.forward(adapter.pack(features[::-1]))
    return torch.cat([out.tokens for out in outputs[::-1]])


def share_head_among_positions(path: Path) -> None:
    """Qwen2.5-VL's default shares of time, height and width are more than a head of the tiny language model has."""
    config = json.loads(path.read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [4, 4, 4]
    path.write_text(json.dumps(config))


def answer(model: Any, ids: Tensor, rows: Tensor, features: list[Features]) -> Tensor:
    """Logits of the language half of `model`, with `rows` in the placeholders' places."""
    embeds, places = model.get_input_embeddings()(ids), ids == IMAGE
    width = embeds.shape[-1]
    embeds[places] = rows[:, :width]
    options: dict[str, Any] = {}
    if hasattr(model.model, "get_rope_index"):
        grids = torch.tensor([item.grid for item in features])
        positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=places.int(), image_grid_thw=grids)
        options["position_ids"] = positions
    levels = rows[:, width:].split(width, dim=-1)
    if rows.shape[-1] > width:
        options |= {"visual_pos_masks": places, "deepstack_visual_embeds": list(levels)}
    hidden = model.model.language_model(inputs_embeds=embeds, **options).last_hidden_state
    logits: Tensor = model.lm_head(hidden)
    return logits


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_logits_are_those_of_the_whole_model(family: str, tmp_path: Path, context: LoadContext) -> None:
    entry = next(entry for entry in registry.FAMILIES if entry.family == family)
    adapter_class(entry).tiny_checkpoint(tmp_path, seed=4)
    if family == "qwen2_5_vl":
        share_head_among_positions(tmp_path / "config.json")
    adapter, whole = load_adapter(tmp_path, context), WholeModel(family, tmp_path)
    features = [adapter.preprocess(picture) for picture in pictures()]
    ids = prompt(features)
    with torch.inference_mode():
        rows = ours(adapter, features)
        got = answer(whole.model, ids, rows, features)
        inputs = whole.inputs(pictures())
        want = whole.model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **inputs).logits
        other = answer(whole.model, ids, rows.flip(0), features)
    largest = float(want.abs().max())
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= TOLERANCE * largest
    # It would be seen: rows in another order give other logits.
    assert float((other - want).abs().max()) > 1e-2 * largest
