"""InternVL (the `-hf` checkpoints): tiles of the picture and the whole one, four patches to a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.configuration_internvl import InternVLConfig
from transformers.models.internvl.modeling_internvl import InternVLForConditionalGeneration

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.tiling import Tiling, grids_within
from spmd_encoder.api.types import Modality
from spmd_encoder.distributed.collectives import sum_over
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.fixed_size import tile_side
from spmd_encoder.models.frame_films import InternFilms
from spmd_encoder.models.llava import PROJECTION
from spmd_encoder.models.sharding import RowParallelLinear, Split, TowerPlan, run_batched
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.towers import FEED_FORWARD
from spmd_encoder.models.vision_language import TINY_LLAMA, VISION, TilePreprocessor, VisionLanguageAdapter
from spmd_encoder.models.weights import from_folder


class InternAttention(nn.Module):
    """Takes the place of transformers' own after it was cut, which counts on having all heads.

    InternViT-6B norms queries and keys over the width of all heads: the ranks add up their squares.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.columns = nn.ModuleList([attention.q_proj, attention.k_proj, attention.v_proj])
        self.projection_layer: RowParallelLinear = attention.projection_layer
        self._head_dim, self._width = int(attention.head_dim), int(attention.embed_dim)
        self.norms: nn.Parameter | None = None
        if not isinstance(attention.q_norm, nn.Identity):
            both = torch.stack([attention.q_norm.weight, attention.k_norm.weight])
            self.norms = nn.Parameter(both[:, None, None], requires_grad=False)
            self._epsilon = float(attention.q_norm.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """`[tiles, rows, width]` to the same; the second is where transformers' has weights of attention."""
        query, key, value = (column(hidden_states) for column in self.columns)
        if self.norms is not None:
            query, key = self._normed(torch.stack([query, key]), self.norms)
        heads = [part.unflatten(-1, (-1, self._head_dim)).transpose(1, 2) for part in (query, key, value)]
        out = F.scaled_dot_product_attention(*heads)
        return self.projection_layer(out.transpose(1, 2).flatten(2)), None

    def _normed(self, both: Tensor, weights: Tensor) -> Tensor:
        """Queries and keys `[2, tiles, rows, this rank's columns]`, as `InternVLVisionRMSNorm` of all columns."""
        wide = both.float()
        squares = wide.square().sum(-1, keepdim=True)
        sum_over(self.projection_layer.group, squares)
        return weights * (wide * torch.rsqrt(squares / self._width + self._epsilon)).to(both.dtype)


ATTENTION = Split(
    path="attention",
    columns=("q_proj", "k_proj", "v_proj"),
    row="projection_layer",
    heads="num_heads",
    run=run_batched,
    faster=InternAttention,
)


class InternVLAdapter(VisionLanguageAdapter):
    """`tokens` `[rows, dim]`: the tiles' rows, row by row of the picture, and last those of the whole picture.

    `grid` has the number of tiles first, then the patches of one of them, high and wide. A frame of a film is one tile.
    """

    model_types = ("internvl",)
    family = "internvl"
    modalities = (Modality.IMAGE, Modality.VIDEO)
    model_class = InternVLForConditionalGeneration
    config_class = InternVLConfig

    @classmethod
    def plan(cls, config: Any) -> TowerPlan:
        norms = ("q_norm", "k_norm") if config.vision_config.use_qk_norm else ()
        return TowerPlan(
            blocks=f"{VISION}.encoder.layer",
            num_blocks=config.vision_config.num_hidden_layers,
            in_block=(replace(ATTENTION, norms=norms), FEED_FORWARD),
            once=(PROJECTION,),
        )

    @classmethod
    def load_preprocessor(cls, folder: Path) -> TilePreprocessor:
        processor: Any = from_folder(GotOcr2ImageProcessorPil, folder)
        config: Any = from_folder(InternVLConfig, folder)
        pixels, patch = (
            tile_side(config.vision_config.image_size, processor, folder),
            config.vision_config.patch_size[0],
        )
        side = pixels // patch
        tiling = Tiling(rule="aspect", side=pixels, grids=grids_within(processor.min_patches, processor.max_patches))
        cost = CostTable(patch=patch, fixed_tokens=side**2, tiling=tiling)
        # transformers' whole processor cuts pictures into tiles, whatever the image processor's own file says.
        rows = int(side * config.downsample_ratio) ** 2
        films = InternFilms.load(folder, pixels, patch, rows)
        return TilePreprocessor(processor, cost, (side, side), rows, crop_to_patches=True).with_films(films)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        config = InternVLConfig(
            vision_config={
                **TINY_VISION,
                "image_size": [112, 112],
                "patch_size": [14, 14],
                "attention_bias": True,
                "use_qk_norm": True,  # as InternViT-6B
                "norm_type": "rms_norm",
            },
            text_config=TINY_LLAMA,
            image_token_id=60,
            image_seq_length=16,
        )
        processor = GotOcr2ImageProcessorPil(
            size={"height": 112, "width": 112},
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
            max_patches=6,
        )
        write_random(cls.model_class, config, processor, out, seed)
