"""What CLIP, SigLIP and SigLIP 2 share: the layers of their image encoders, and a language half that is not read.

The vision half is a class of transformers' own, which takes its weights out of a whole checkpoint too: the language
half is not even built.
"""

from __future__ import annotations

from typing import Any

from spmd_encoder.api.types import OutputKind
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.towers import ATTENTION, FEED_FORWARD


def encoder_plan(layers: str, config: Any) -> TowerPlan:
    """The plan of the ModuleList `layers`. What is outside of it stays whole on every rank.

    That is little: the embeddings, the projection, and SigLIP's pooling head, which is as large as one layer and
    keeps its attention in the single tensor of `nn.MultiheadAttention`.
    """
    return TowerPlan(blocks=layers, num_blocks=config.num_hidden_layers, in_block=(ATTENTION, FEED_FORWARD))


def pooling_head_dims(config: Any) -> dict[OutputKind, int]:
    """The outputs of a SigLIP tower: pooled only where it has its head."""
    width = int(config.hidden_size)
    tokens = {OutputKind.TOKENS: width}
    return {**tokens, OutputKind.POOLED: width} if config.vision_use_head else tokens


TINY_VISION = {
    "hidden_size": 48,
    "intermediate_size": 100,  # not divisible by 3
    "num_hidden_layers": 3,
    "num_attention_heads": 6,  # not divisible by 4
}
TINY_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
