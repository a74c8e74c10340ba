"""What families for retrieval share that give many vectors per picture: one for each token of a prompt around it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spmd_encoder.api.types import Detail, Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor, TowerOutput
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes


class MultiVectorAdapter(FamilyAdapter):
    """`tokens` `[prompt, embedding_dim]` are `embeddings` of the whole model, each of length 1: of the prompt that the
    family's processor writes around one picture, its words included.

    The language model is part of the encoder. Texts are not taken: queries are encoded elsewhere.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)
    model_class: ClassVar[type[PreTrainedModel]]
    config_class: ClassVar[type[PreTrainedConfig]]
    is_causal: ClassVar[bool] = False
    """Whether a row of the prompt sees earlier ones alone."""
    first_position: ClassVar[int] = 0

    def __init__(self, model: PreTrainedModel, preprocessor: Preprocessor, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        config: Any = model.config
        self._image_token = int(config.vlm_config.image_token_id)
        self.embedding_dims = {OutputKind.TOKENS: int(config.embedding_dim)}
        self.tower_bytes = real_bytes(model)

    @classmethod
    @abstractmethod
    def plan(cls, vlm: Any) -> TowerPlan:
        """How a model with this vision-language configuration is cut. Raises StartupError for parts not known here."""

    @abstractmethod
    def picture_rows(self, batch: Mapping[str, Tensor]) -> Tensor:
        """`[rows of all pictures, width]`, which the language model sees in the place of the picture's tokens."""

    def read(self, prompts: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """What the language model makes of `prompts` `[1, rows, width]` with `positions` `[1, rows]`, whose `ends` are
        `[items + 1]` int32 after a 0, on the CPU."""
        model: Any = self._model
        hidden: Tensor = model.vlm.language_model(
            inputs_embeds=prompts, position_ids=positions, use_cache=False, cu_seqlens=ends, is_causal=self.is_causal
        ).last_hidden_state
        return hidden

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> Self:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(cls.config_class, folder)
        _check_prompt(preprocessor, config.vlm_config, folder)
        config.vlm_config.vision_config.vision_use_head = False  # SigLIP's pooling has no part in it
        model = load_tower(cls.model_class, config, folder, "", cls.plan(config.vlm_config), context)
        return cls(model, preprocessor, context.device)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`input_ids` `[rows of all prompts]` int64, `lengths` `[items]` int64, and what `picture_rows` takes, one
        picture after the other."""
        pictures = sorted(items[0].tensors.keys() - {"input_ids"})
        return {
            "input_ids": torch.cat([item.tensors["input_ids"] for item in items]),
            "lengths": torch.tensor([item.num_tokens for item in items]),
            **{name: torch.cat([item.tensors[name] for item in items]) for name in pictures},
        }

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        model: Any = self._model
        ids, lengths = batch["input_ids"].to(self._device), batch["lengths"]
        is_picture = ids == self._image_token
        pictures = self.picture_rows({name: tensor.to(self._device) for name, tensor in batch.items()})
        # The token that stands for a picture need not be one of the language model's.
        prompt: Tensor = model.vlm.get_input_embeddings()(ids.masked_fill(is_picture, 0))
        prompt = prompt.masked_scatter(is_picture[:, None], pictures.to(prompt.dtype))
        first = self.first_position
        positions = torch.cat([torch.arange(first, first + length) for length in lengths.tolist()])
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
        hidden = self.read(prompt[None], positions[None].to(self._device), ends)
        vectors: Tensor = model.embedding_proj_layer(hidden[0])
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        return [TowerOutput(tokens=rows) for rows in torch.split(vectors, lengths.tolist())]


def prompt_of(made: Mapping[str, Tensor], image_token: int) -> tuple[Tensor, dict[str, Detail]]:
    """(`input_ids` `[rows]`, where in it the picture lies) out of what a processor makes of one picture: begin and end
    of each stretch of its own rows, one after the other."""
    ids = made["input_ids"][0]
    outside = ids.new_zeros(1)
    bounds = torch.cat([outside, (ids == image_token).to(ids.dtype), outside]).diff().nonzero()
    return ids, {"image_rows": bounds.flatten().tolist()}


def _check_prompt(preprocessor: Preprocessor, vlm: Any, folder: Path) -> None:
    """Raises StartupError where the tokenizer's tokens are not those of the model."""
    ids = preprocessor.preprocess(Image.new("RGB", (64, 64))).tensors["input_ids"]
    words = ids[ids != vlm.image_token_id]
    if len(words) == len(ids) or int(words.max()) >= vlm.text_config.vocab_size:
        raise StartupError(f"{folder}: the tokenizer's tokens are not those that config.json asks for")
