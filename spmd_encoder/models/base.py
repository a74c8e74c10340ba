"""What a model family provides. One subclass per file, one line per family in `models.registry`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.types import Detail, ItemOptions, Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Film, FilmInfo, Sound


@dataclass(frozen=True, kw_only=True)
class Features:
    """One item, model-ready: CPU tensors as the family's processor made them.

    `num_tokens` is the promised number of rows of the token-level output, known before the forward;
    `cost` is the number of patches (of sounds: frames) that the tower computes. `details` go into the reply.
    """

    tensors: Mapping[str, Tensor]
    num_tokens: int
    cost: int
    grid: tuple[int, int, int] | None = None
    modality: Modality = Modality.IMAGE
    details: dict[str, Detail] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TowerOutput:
    """One item's result: `tokens` `[num_tokens, dim]`, `pooled` `[dim]` where the model has it (its own `dim`)."""

    tokens: Tensor
    pooled: Tensor | None = None

    @classmethod
    def of_batch(cls, tokens: Iterable[Tensor], pooled: Tensor | None) -> list[TowerOutput]:
        """One per item, out of each item's rows and, where the model has it, `pooled` `[items, dim]`."""
        if pooled is None:
            return [cls(tokens=rows) for rows in tokens]
        return [cls(tokens=rows, pooled=one) for rows, one in zip(tokens, pooled, strict=True)]


@dataclass(frozen=True, kw_only=True)
class LoadContext:
    """Where and how this rank's part of the model is loaded. A group of one is an ordinary group."""

    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    fast_linears: bool = False
    """Kernels that take longer to load and more memory, and round otherwise (`models.linear`)."""


class Preprocessor(ABC):
    """A family's way from decoded media to features: no weights, no device, no group. It runs in processes of its own.

    It has the methods of the modalities that its adapter declares. Each raises EncoderError MEDIA_CORRUPT for an item
    that the family cannot take (for example an extreme aspect ratio), saying why.
    """

    sampling_rate: int = 0
    """Hz of the sounds that `preprocess_audio` takes."""

    @abstractmethod
    def cost_table(self) -> CostTable: ...

    def not_served(self) -> Mapping[Modality, str]:
        """Of the adapter's modalities those that this checkpoint's own settings do not allow, each with the reason."""
        return {}

    def preprocess(self, image: Image.Image) -> Features:
        """RGB picture to features, with transformers' own processor."""
        raise _not_served(Modality.IMAGE)

    def preprocess_audio(self, sound: Sound) -> Features:
        """Sound at `sampling_rate` to features, with transformers' own feature extractor."""
        raise _not_served(Modality.AUDIO)

    def choose_frames(self, info: FilmInfo, options: ItemOptions) -> Sequence[int]:
        """Which frames of a film are encoded, ascending, as the family's own video processor samples."""
        raise _not_served(Modality.VIDEO)

    def preprocess_video(self, film: Film) -> Features:
        """The chosen frames to features, equal to what transformers' own video processor makes of them."""
        raise _not_served(Modality.VIDEO)


def _not_served(modality: Modality) -> EncoderError:
    return EncoderError(ErrorCode.MEDIA_UNSUPPORTED, f"this model takes no {modality} items")


class FamilyAdapter(ABC):
    """One loaded model (this rank's shard of it) and everything that is peculiar to its family."""

    model_types: ClassVar[tuple[str, ...]]
    family: ClassVar[str]
    modalities: ClassVar[tuple[Modality, ...]]

    embedding_dims: Mapping[OutputKind, int]
    """The outputs that this model has, with the last dimension of each."""
    tower_bytes: int
    """Bytes of the parameters that this rank holds."""
    preprocessor: Preprocessor

    @property
    def outputs(self) -> tuple[OutputKind, ...]:
        return tuple(self.embedding_dims)

    @property
    def default_output(self) -> OutputKind:
        """Pooled where the model has it, else tokens."""
        return OutputKind.POOLED if OutputKind.POOLED in self.embedding_dims else OutputKind.TOKENS

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        """This rank's shard of the checkpoint in `folder`. Collective: every rank of the group calls it.

        Raises StartupError, one sentence, for whatever keeps the checkpoint from being served.
        """

    @classmethod
    @abstractmethod
    def load_preprocessor(cls, folder: Path) -> Preprocessor:
        """Only what makes features for the checkpoint in `folder`. Raises StartupError, one sentence."""

    @classmethod
    @abstractmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        """Write a tiny random checkpoint of this family with its processor's configuration into `out`
        (made where missing). The same seed gives the same bytes on every machine."""

    def cost_table(self) -> CostTable:
        return self.preprocessor.cost_table()

    def preprocess(self, image: Image.Image) -> Features:
        return self.preprocessor.preprocess(image)

    @abstractmethod
    def batch_key(self, features: Features) -> Hashable:
        """Items of one modality with equal keys may run in one forward."""

    @abstractmethod
    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """The batch's input tensors (CPU, contiguous). They are all that `forward` gets, on every TP rank."""

    @abstractmethod
    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        """One output per item, in order, on the device. Runs under `torch.inference_mode()` on every TP rank."""
