"""How transformers' whole model of each family is asked for one picture. A new family adds its line to `REFERENCES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from spmd_encoder.models.dinov3_pictures import DINOv3Processor

Reference = Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor | None]]
"""(whole model, processor's tensors of one picture) to (tokens, pooled)."""


def _qwen(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return model.get_image_features(**inputs).pooler_output[0], None


def _qwen3_vl(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    out = model.get_image_features(**inputs)
    return torch.cat([out.pooler_output[0], *(level[0] for level in out.deepstack_features)], dim=-1), None


def _rows(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Families that give a list with the rows of each picture."""
    return model.get_image_features(**inputs).pooler_output[0], None


def _tiles(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Families that give `[tiles, rows, dim]`."""
    return model.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1), None


def _in_company(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Families whose code breaks on a batch of one row in all."""
    return _rows(model, {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()})


def _slices(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Families that give the rows of each slice of a picture."""
    return torch.cat(model.get_image_features(inputs["pixel_values"], inputs["target_sizes"]).pooler_output), None


def _clip(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    out = model.get_image_features(**inputs)
    return out.last_hidden_state[0, 1:], out.pooler_output[0]


def _siglip(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    out = model.get_image_features(**inputs)
    return out.last_hidden_state[0], out.pooler_output[0]


def _siglip2(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    rows, pooled = _siglip(model, inputs)
    return rows[inputs["pixel_attention_mask"][0].bool()], pooled


def _dinov2(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    out = model(**inputs)
    return out.last_hidden_state[0, 1:], out.pooler_output[0]


def _registers(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    out = model(**inputs)
    return out.last_hidden_state[0, 1 + model.config.num_register_tokens :], out.pooler_output[0]


def _multi_vector(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return model(**inputs).embeddings[0], None


REFERENCES: dict[str, tuple[str, Reference]] = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _qwen),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _qwen3_vl),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", _qwen3_vl),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", _qwen),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", _qwen),
    "glm4v": ("Glm4vForConditionalGeneration", _qwen),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", _qwen),
    "glm46v": ("Glm46VForConditionalGeneration", _qwen),
    "llava": ("LlavaForConditionalGeneration", _rows),
    "llava_next": ("LlavaNextForConditionalGeneration", _rows),
    "llava_next_video": ("LlavaNextVideoForConditionalGeneration", _rows),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", _rows),
    "internvl": ("InternVLForConditionalGeneration", _tiles),
    "mistral3": ("Mistral3ForConditionalGeneration", _in_company),
    "gemma3": ("Gemma3ForConditionalGeneration", _tiles),
    "paligemma": ("PaliGemmaForConditionalGeneration", _tiles),
    "idefics3": ("Idefics3ForConditionalGeneration", _rows),
    "smolvlm": ("SmolVLMForConditionalGeneration", _rows),
    "minicpmv4_6": ("MiniCPMV4_6ForConditionalGeneration", _slices),
    "minicpmv4_7": ("MiniCPMV4_7ForConditionalGeneration", _slices),
    "clip": ("CLIPModel", _clip),
    "siglip": ("SiglipModel", _siglip),
    "siglip2": ("Siglip2Model", _siglip2),
    "dinov2": ("Dinov2Model", _dinov2),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", _registers),
    "dinov3_vit": ("DINOv3ViTModel", _registers),
    "dinov3_convnext": ("DINOv3ConvNextModel", _dinov2),
    "colpali": ("ColPaliForRetrieval", _multi_vector),
    "colqwen2": ("ColQwen2ForRetrieval", _multi_vector),
    "colmodernvbert": ("ColModernVBertForRetrieval", _multi_vector),
    "qwen2_5_omni": ("Qwen2_5OmniThinkerForConditionalGeneration", _qwen),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration", _qwen3_vl),
}

SAME_TOWER = {
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5_moe": "qwen3_5",
    "glm4v_moe": "glm4v",
    "glm46v": "glm4v",
    "smolvlm": "idefics3",
    "minicpmv4_7": "minicpmv4_6",
}
"""Families that differ from another one in their language half alone: long tests of worlds leave them out."""

WHOLE_PROCESSORS = {
    "colpali": "ColPaliProcessor",
    "colqwen2": "ColQwen2Processor",
    "colmodernvbert": "ColModernVBertProcessor",
}
"""Of families whose reference takes a prompt too."""

OPTIONS: dict[str, dict[str, Any]] = {
    "internvl": {"crop_to_patches": True},
    "mistral3": {"patch_size": 28},
}
"""What transformers' whole processor of a family calls its image processor with."""


class WholeModel:
    """The checkpoint in `folder` as transformers runs it, language half and all, in float32."""

    def __init__(self, family: str, folder: Path) -> None:
        name, self._ask = REFERENCES[family]
        models: Any = transformers  # its classes are only partly typed
        self.model = getattr(models, name).from_pretrained(folder, dtype=torch.float32).eval()
        # transformers has DINOv3's for torchvision only; ours is compared with it by `make torchvision`.
        ours = DINOv3Processor.from_folder(folder) if family.startswith("dinov3") else None
        cls = getattr(models, WHOLE_PROCESSORS.get(family, "AutoImageProcessor"))
        theirs: Any = ours or cls.from_pretrained(folder, backend="pil")
        self._processor = theirs.process_images if family in WHOLE_PROCESSORS else theirs
        self._options = OPTIONS.get(family, {})

    def encode(self, image: Image.Image) -> tuple[Tensor, Tensor | None]:
        """(`tokens` `[rows, dim]`, `pooled` `[dim]` or None) of one RGB picture."""
        with torch.inference_mode():
            return self._ask(self.model, self.inputs(image))

    def inputs(self, images: Image.Image | list[Image.Image]) -> dict[str, Any]:
        """What the family's processor makes of one or several pictures."""
        return dict(self._processor(images=images, return_tensors="pt", **self._options))
