"""Any further model of transformers with `get_image_features` or its like for sounds or films: whole, item by item."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vipllava.configuration_vipllava import VipLlavaConfig
from transformers.models.vipllava.modeling_vipllava import VipLlavaForConditionalGeneration

from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, TowerOutput
from spmd_encoder.models.building import build_on_meta
from spmd_encoder.models.contrastive import TINY_VISION
from spmd_encoder.models.fallback_items import FallbackPreprocessor, first_line
from spmd_encoder.models.fallback_model import METHODS, encode
from spmd_encoder.models.sharding import refuse_cutting
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA
from spmd_encoder.models.weights import load_whole, place, real_bytes

log = logging.getLogger(__name__)


class FallbackAdapter(FamilyAdapter):
    """`tokens` `[rows, dim]` or, where the model has one vector per item, `pooled` `[dim]` alone: what the model's own
    method gives for the item. Nothing is cut: `--mm-encoder-tp-mode data` is the only way to more than one rank.

    Only those of the model's parts are loaded that its rows come of, as far as they can be told apart.
    """

    model_types = ()
    family = "fallback"
    modalities = tuple(METHODS)
    preprocessor: FallbackPreprocessor

    def __init__(self, model: PreTrainedModel, preprocessor: FallbackPreprocessor, context: LoadContext) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device, self._dtype = context.device, context.dtype
        output = OutputKind.POOLED if preprocessor.is_pooled else OutputKind.TOKENS
        self.embedding_dims = {output: preprocessor.width}
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> FallbackPreprocessor:
        return FallbackPreprocessor(folder)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> FallbackAdapter:
        preprocessor = cls.load_preprocessor(folder)
        features = preprocessor.model
        refuse_cutting(context.group, f"model type {features.config.model_type!r}, which only the fallback serves,")
        model = load_whole(features.cls, features.config, folder, preprocessor.kept, context.dtype)
        place(model, context)
        _cast_buffers(model, context.dtype)
        adapter = cls(model, preprocessor, context)
        adapter._prove(folder)
        log.warning(
            "model type %r is served by the fallback, one item at a time: %s of transformers, its parts %s",
            features.config.model_type,
            features.cls.__name__,
            ", ".join(preprocessor.kept),
        )
        return adapter

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """Each item's tensors as they are, as `<number>.<modality>.<name>`."""
        return {
            f"{number}.{item.modality}.{name}": tensor
            for number, item in enumerate(items)
            for name, tensor in item.tensors.items()
        }

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        items: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, tensor in batch.items():
            number, modality, name = key.split(".")
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            items.setdefault((number, modality), {})[name] = tensor.to(self._device, dtype)
        return [self._encode(Modality(modality), inputs) for (_, modality), inputs in items.items()]

    def _encode(self, modality: Modality, inputs: Mapping[str, Tensor]) -> TowerOutput:
        rows = encode(self._model, modality, inputs)
        return TowerOutput(tokens=rows, pooled=rows[0] if self.preprocessor.is_pooled else None)

    def _prove(self, folder: Path) -> None:
        """Raises StartupError where the model fails, does not give what was promised of it, or not twice the same."""
        features = self.preprocessor.model
        for modality in self.preprocessor.served:
            inputs = features.inputs(modality, self.preprocessor.samples(modality)[-1])
            promised = features.outcome(modality, inputs)
            item = Features(tensors=inputs, num_tokens=promised.rows, cost=1, modality=modality)
            try:
                with torch.inference_mode():
                    first, again = (self.forward(self.pack([item]))[0].tokens for _ in range(2))
            except Exception as error:  # the model's own code: some fails in other dtypes than it was written for
                raise StartupError(
                    f"{folder}: {METHODS[modality]} fails in {str(self._dtype).removeprefix('torch.')} "
                    f"({first_line(error)}): give another --dtype, if the fallback is to serve this model"
                ) from error
            if first.shape != (promised.rows, self.preprocessor.width):
                raise StartupError(
                    f"{folder}: {METHODS[modality]} gives rows of shape {tuple(first.shape)} where "
                    f"({promised.rows}, {self.preprocessor.width}) was expected: the fallback cannot serve this model"
                )
            if not torch.equal(first.nan_to_num(), again.nan_to_num()):
                raise StartupError(
                    f"{folder}: {METHODS[modality]} gives other values each time (it draws at random): the fallback "
                    "cannot serve this model"
                )

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        """A ViP-LLaVA, which has no family here."""
        config = VipLlavaConfig(
            vision_config={**TINY_VISION, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
            text_config=TINY_LLAMA,
            vision_feature_layer=[-2, -3],
            image_token_index=60,
            image_seq_length=64,
        )
        processor = CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
        write_random(VipLlavaForConditionalGeneration, config, processor, out, seed)


def _cast_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the statistics of norms, fixed positions and the like the dtypes that transformers would build them in."""
    wanted = dict(build_on_meta(type(model), model.config, dtype).named_buffers())
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(wanted[f"{path}.{name}".lstrip(".")].dtype))
