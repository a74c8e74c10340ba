"""How transformers' whole model of each family is asked for one film. A new family adds its line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

FilmReference = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(whole model, our tensors of one film) to its rows."""


def _qwen(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    rows: Tensor = _ask_qwen(model, inputs).pooler_output[0]
    return rows


def _qwen_deepstack(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    out = _ask_qwen(model, inputs)
    return torch.cat([out.pooler_output[0], *(level[0] for level in out.deepstack_features)], dim=-1)


def _ask_qwen(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    return model.get_video_features(pixel_values_videos=inputs["pixel_values"], video_grid_thw=inputs["image_grid_thw"])


def _frames(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Families that have a method for films."""
    rows: Tensor = model.get_video_features(inputs["pixel_values"][None]).pooler_output
    return rows.flatten(0, -2)


def _frames_as_pictures(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Families whose prompt takes a film's frames as pictures."""
    rows: Tensor = model.get_image_features(inputs["pixel_values"]).pooler_output
    return rows.flatten(0, -2)


def _pictures_of_a_prompt(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(tuple(model.get_image_features(inputs["pixel_values"][None]).pooler_output))


FILM_REFERENCES: dict[str, FilmReference] = {
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen_deepstack,
    "qwen3_vl_moe": _qwen_deepstack,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen2_5_omni": _qwen,
    "qwen3_omni_moe": _qwen_deepstack,
    "glm4v": _qwen,
    "glm4v_moe": _qwen,
    "glm46v": _qwen,
    "llava_next_video": _frames,
    "llava_onevision": _frames,
    "internvl": _frames_as_pictures,
    "smolvlm": _pictures_of_a_prompt,
}
