"""What the Qwen-VL families share: one image processor, patches packed without padding, rows for placeholder tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import ItemOptions, Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.media.base import Film, FilmInfo
from spmd_encoder.models.attention import PackedAttention
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor, TowerOutput
from spmd_encoder.models.film_settings import FilmMaker
from spmd_encoder.models.linear import by_rows, linear_block, packed
from spmd_encoder.models.picture import run_processor
from spmd_encoder.models.qwen_video import Patches, QwenFilms
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes

TOWER = "model.visual"
"""Where all of these families' whole models keep the tower."""


def run_attention(attention: nn.Module, hidden: Tensor) -> Tensor:
    """The attention of one block over three segments, two of them of equal length."""
    rows = hidden.shape[0]
    ends = torch.tensor([0, rows // 4, rows // 4 * 2, rows], dtype=torch.int32, device=hidden.device)
    angle = torch.linspace(0, 6, rows, device=hidden.device)[:, None].repeat(1, int(attention.head_dim))  # type: ignore[arg-type]
    out: Tensor = attention(hidden, cu_seqlens=ends, position_embeddings=(angle.cos(), angle.sin()), max_seqlen=rows)
    return out


ATTENTION = Split(
    path="attn", columns=("qkv",), parts=3, row="proj", heads="num_heads", run=run_attention, faster=PackedAttention
)


class PatchEmbedding(nn.Module):
    """Takes the place of transformers' own on a CPU, which convolves each patch as a picture of its own.

    Here a block of patches lies side by side, as one wide picture. The sums are the same to the bit and take a
    quarter of the time; those of a Linear are in another order, 1e-6 away, and taken where `fast` allows that.
    """

    def __init__(self, embedding: Any, *, fast: bool = False) -> None:
        super().__init__()
        self.proj: nn.Conv3d = embedding.proj
        self._fast = packed(self.proj.weight.flatten(1)) if fast else None

    def forward(self, pixels: Tensor) -> Tensor:
        """`[patches, patch values]` to `[patches, width]`."""
        return by_rows(self._block, pixels.to(self.proj.weight.dtype))

    def _block(self, pixels: Tensor) -> Tensor:
        if self._fast is not None:
            return linear_block(pixels, self.proj.weight.flatten(1), self.proj.bias, self._fast)
        channels, (time, height, width) = self.proj.in_channels, self.proj.kernel_size
        wide = pixels.view(-1, channels, time, height, width).permute(1, 2, 3, 0, 4).flatten(3)
        return self.proj(wide).flatten(1).t().contiguous()  # type: ignore[no-any-return]


class PatchPreprocessor(Preprocessor):
    """Patches of one picture, `[t * h * w, patch values]`, resized to a multiple of patch times merge per side."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def cost_table(self) -> CostTable:
        size = self.processor.size
        return CostTable(
            patch=self.processor.patch_size,
            merge=self.processor.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
        )

    def preprocess(self, image: Image.Image) -> Features:
        made = run_processor(self.processor, image)
        pixels, grid = made["pixel_values"], made["image_grid_thw"]
        t, h, w = (int(n) for n in grid[0])
        return Features(
            tensors={"pixel_values": pixels, "image_grid_thw": grid},
            num_tokens=t * h * w // int(self.processor.merge_size) ** 2,
            cost=t * h * w,
            grid=(t, h, w),
        )


class QwenPreprocessor(PatchPreprocessor):
    """Films too, as patches of the same kind."""

    def __init__(self, processor: Any, films: FilmMaker) -> None:
        super().__init__(processor)
        self._films = films

    def cost_table(self) -> CostTable:
        return replace(super().cost_table(), video=self._films.cost())

    def not_served(self) -> Mapping[Modality, str]:
        return {} if self._films.refusal is None else {Modality.VIDEO: self._films.refusal}

    def choose_frames(self, info: FilmInfo, options: ItemOptions) -> list[int]:
        return self._films.choose(info, options)

    def preprocess_video(self, film: Film) -> Features:
        return self._films.features(film)


class QwenVLAdapter(FamilyAdapter):
    """`tokens` `[t * h * w / merge**2, dim]` in the order of the language model's placeholders.

    The tower is transformers' own, with three parts in place of its slower ones: `PatchEmbedding`, `PackedAttention`
    and `FeedForward`. They keep the order of its sums: in float32 on the CPUs tested the bits are the same.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.VIDEO)
    films: ClassVar[type[QwenFilms]]
    model_class: ClassVar[type[PreTrainedModel]]
    config_class: ClassVar[type[PreTrainedConfig]]
    kept: ClassVar[tuple[str, ...]] = (TOWER,)
    """Paths of all that is read of the checkpoint."""

    def __init__(self, model: PreTrainedModel, preprocessor: Preprocessor, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        vision: Any = model.config.vision_config
        self.embedding_dims = {OutputKind.TOKENS: self.width(vision)}
        self.tower_bytes = real_bytes(model)

    @classmethod
    @abstractmethod
    def plan(cls, vision: Any) -> TowerPlan:
        """How a tower with this vision configuration is cut."""

    @classmethod
    def whole_plan(cls, config: Any) -> TowerPlan:
        """How all that is read is cut."""
        return cls.plan(config.vision_config)

    @classmethod
    @abstractmethod
    def width(cls, vision: Any) -> int:
        """Values of one row that a tower with this vision configuration gives."""

    @classmethod
    def load_preprocessor(cls, folder: Path) -> PatchPreprocessor:
        pictures = from_folder(Qwen2VLImageProcessorPil, folder)
        return QwenPreprocessor(pictures, cls.films.load(folder, patches_of(pictures)))

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(cls.config_class, folder)
        check_patches(preprocessor.processor, config.vision_config, folder)
        _leave_out_layers(config.text_config)
        model = load_tower(cls.model_class, config, folder, cls.kept, cls.whole_plan(config), context)
        tower: Any = model.get_submodule(TOWER)
        if context.device.type == "cpu":
            tower.patch_embed = PatchEmbedding(tower.patch_embed, fast=context.fast_linears)
        return cls(model, preprocessor, context.device)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`pixel_values` `[all patches, patch values]` float32, `image_grid_thw` `[items, 3]` int64."""
        return {name: torch.cat([item.tensors[name] for item in items]) for name in ("pixel_values", "image_grid_thw")}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        out = self.ask(batch["pixel_values"].to(self._device), batch["image_grid_thw"].to(self._device))
        return [TowerOutput(tokens=tokens) for tokens in self.rows(out)]

    def ask(self, pixels: Tensor, grids: Tensor) -> Any:
        """What transformers' model gives for the patches of pictures and films with these `grids`."""
        model: Any = self._model
        return model.get_image_features(pixel_values=pixels, image_grid_thw=grids)

    def rows(self, out: Any) -> Sequence[Tensor]:
        """The rows of each picture out of what `get_image_features` gives."""
        rows: Sequence[Tensor] = out.pooler_output
        return rows


def _leave_out_layers(text: Any) -> None:
    """Have no layer of the language half built: they are of no use here, and take longer to build than the tower."""
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []


def patches_of(processor: Any) -> Patches:
    """Those that a processor of pictures makes, which are those of the tower (`check_patches`)."""
    return processor.patch_size, processor.merge_size, processor.temporal_patch_size


def check_patches(processor: Any, vision: Any, folder: Path) -> None:
    """Raises StartupError where the processor makes other patches than the tower takes."""
    made = patches_of(processor)
    taken = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
    if made != taken:
        raise StartupError(
            f"{folder}: preprocessor_config.json makes patches of (patch, merge, temporal) sizes {made}, "
            f"but config.json asks for {taken}"
        )


def tiny_whole(width: int) -> dict[str, Any]:
    """The language half, and the special tokens, of a tiny configuration whose rows have `width` values."""
    return {
        "text_config": {
            "vocab_size": 64,
            "hidden_size": width,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "image_token_id": 60,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    }
