"""The vision towers that vision-language models are built of, by their own model type, and how each is cut."""

from __future__ import annotations

from typing import Any

from spmd_encoder.errors import StartupError
from spmd_encoder.models import pixtral
from spmd_encoder.models.sharding import Split, TowerPlan, run_batched

ATTENTION = Split(
    path="self_attn", columns=("q_proj", "k_proj", "v_proj"), row="out_proj", heads="num_heads", run=run_batched
)
FEED_FORWARD = Split(path="mlp", columns=("fc1",), row="fc2")
PLANS = {
    "clip_vision_model": ("encoder.layers", (ATTENTION, FEED_FORWARD)),
    "siglip_vision_model": ("encoder.layers", (ATTENTION, FEED_FORWARD)),
    "idefics3_vision": ("encoder.layers", (ATTENTION, FEED_FORWARD)),
    "smolvlm_vision": ("encoder.layers", (ATTENTION, FEED_FORWARD)),
    "pixtral": ("transformer.layers", pixtral.BLOCK),
}
"""The ModuleList of blocks within each tower, and what is cut of each block."""


def tower_plan(path: str, vision: Any, *once: Split) -> TowerPlan:
    """The plan of the tower at `path` that has the configuration `vision`; `once` are cut beside it.

    Raises StartupError for a tower that is not known here.
    """
    if vision.model_type not in PLANS:
        known = ", ".join(sorted(PLANS))
        raise StartupError(
            f"a vision tower of type {vision.model_type!r} is not supported here; supported are: {known}"
        )
    blocks, in_block = PLANS[vision.model_type]
    return TowerPlan(blocks=f"{path}.{blocks}", num_blocks=vision.num_hidden_layers, in_block=in_block, once=once)
