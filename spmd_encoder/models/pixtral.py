"""Pixtral's tower, of Mistral 3 and of LLaVA models: pictures keep their shape, and each attends to itself alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from spmd_encoder.api.cost import CostTable
from spmd_encoder.errors import StartupError
from spmd_encoder.models.attention import SegmentAttention
from spmd_encoder.models.base import Features, Preprocessor
from spmd_encoder.models.feed_forward import feed_forward
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.sharding import Split


class PixtralPreprocessor(Preprocessor):
    """One picture as `pixel_values` `[1, 3, height, width]`, each side a multiple of patch times merge."""

    def __init__(self, processor: Any, vision: Any, folder: Path, *, merge: int) -> None:
        """`vision` is the tower's configuration. Raises StartupError where its heads do not go with its width."""
        heads, each, width = vision.num_attention_heads, vision.head_dim, vision.hidden_size
        # The positions are made for `head_dim` values, the queries for as many as the width has for each head.
        if heads * each != width:
            raise StartupError(
                f"{folder}: config.json asks for {heads} heads of {each} values (num_attention_heads, head_dim) in a "
                f"tower of {width} (hidden_size), which is not their product"
            )
        self.processor = processor
        self._patch, self._merge = vision.patch_size, merge

    def cost_table(self) -> CostTable:
        size = self.processor.size
        side = size.get("longest_edge") or min(size["height"], size["width"])
        return CostTable(patch=self._patch, merge=self._merge, max_side=side)

    def preprocess(self, image: Image.Image) -> Features:
        # transformers' whole processor gives this patch size, whatever the image processor's own file says.
        made = run_processor(self.processor, image, patch_size=self._patch * self._merge)
        height, width = (int(pixels) // self._patch for pixels in made["image_sizes"][0])
        return Features(
            tensors={"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]},
            num_tokens=height * width // self._merge**2,
            cost=height * width,
            grid=(1, height, width),
        )


class PixtralAttention(SegmentAttention):
    """Takes the place of transformers' own after it was cut: over packed pictures."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention, closing="o_proj")

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cu_seq_lens_q: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """`[1, rows, width]` to the same; the second is where transformers' has weights of attention."""
        return self.attend(hidden_states, cu_seq_lens_q, position_embeddings), None


def use_packed_attention(tower: Any) -> None:
    """Have a tower with `PixtralAttention` say where each picture ends, as for flash attention, and make no mask.

    The mask would have a row and a column for each patch of the whole batch.
    """
    if any(isinstance(module, PixtralAttention) for module in tower.modules()):
        tower.config._attn_implementation = "flash_attention_2"


def _run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over two pictures of unequal size."""
    rows, first = hidden.shape[0], hidden.shape[0] // 3
    ends = torch.tensor([0, first, rows], dtype=torch.int32, device=hidden.device)
    angle = torch.linspace(0, 6, rows, device=hidden.device)[:, None].repeat(1, int(attention.head_dim))  # type: ignore[arg-type]
    picture = torch.arange(rows, device=hidden.device) >= first
    out: Tensor = attention(
        hidden[None],
        attention_mask=picture[:, None] == picture,
        position_embeddings=(angle.cos().to(hidden.dtype), angle.sin().to(hidden.dtype)),
        cu_seq_lens_q=ends,
    )[0]
    return out[0]


BLOCK = (
    Split(
        path="attention",
        columns=("q_proj", "k_proj", "v_proj"),
        row="o_proj",
        heads="num_heads",
        run=_run_attention,
        faster=PixtralAttention,
    ),
    replace(feed_forward("gate_proj", "up_proj", row="down_proj", activation="act_fn"), path="feed_forward"),
)
"""What is cut of each block."""
TINY_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 16,
    "image_size": 336,
    "patch_size": 14,
}
