"""Tiny checkpoints of models that have no family here, and what transformers' whole model gives for an item of theirs.

Among them are one of each kind: tiles, a picture's own grid, rows that are padded and masked, one vector, sounds cut by
a mask, both pictures and sounds, buffers of the served dtype, rows that are the language model's embeddings, and films
whose frames an image processor takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from spmd_encoder.api.types import Modality
from spmd_encoder.media.base import Film, Sound
from spmd_encoder.models.contrastive import TINY_TEXT, TINY_VISION
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.vision_language import TINY_LLAMA

models: Any = transformers  # its classes are only partly typed
Rows = Callable[[Any, dict[str, Tensor]], Tensor]


def _pictures(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """One after the other, whether they come as rows, as tiles or as a list of either."""
    found = model.get_image_features(**inputs).pooler_output
    pieces = found if isinstance(found, list | tuple) else [found]
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])


def _sounds(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    rows: Tensor = model.get_audio_features(**inputs).pooler_output
    return rows


def _films(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    rows: Tensor = model.get_video_features(**inputs).pooler_output
    return rows


def _masked_sounds(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """As the whole model itself takes them."""
    out = model.model.get_audio_features(**inputs)
    rows: Tensor = out.pooler_output[out.attention_mask]
    return rows


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """`config` and `processors` make a checkpoint. `options` are those that its whole processor calls the one for
    pictures with, `takes` what the model takes of what they make."""

    name: str
    cls: str
    config: Callable[[], Any]
    processors: Callable[[], dict[Modality, Any]]
    takes: tuple[str, ...]
    rows: dict[Modality, Rows]
    options: dict[str, Any] = field(default_factory=dict)
    pooled: bool = False

    def write(self, folder: Path, seed: int = 5) -> None:
        """The checkpoint. Where it has two processors they lie in one file, as whole processors save them."""
        first, *others = self.processors().values()
        write_random(getattr(models, self.cls), self.config(), first, folder, seed)
        if others:
            (folder / "preprocessor_config.json").unlink(missing_ok=True)
            names = {Modality.IMAGE: "image_processor", Modality.AUDIO: "feature_extractor"}
            said = {names[modality]: made.to_dict() for modality, made in self.processors().items()}
            (folder / "processor_config.json").write_text(json.dumps(said, default=_plain))


class WholeStranger:
    """The checkpoint in `folder` as transformers runs it, in float32."""

    def __init__(self, stranger: Stranger, folder: Path) -> None:
        self._stranger = stranger
        self._model = getattr(models, stranger.cls).from_pretrained(folder, dtype=torch.float32).eval()
        self._processors = stranger.processors()

    def parameters(self) -> list[Tensor]:
        return list(self._model.parameters())

    def rows(self, item: Image.Image | Sound | Film) -> Tensor:
        """`[rows, dim]` of one item; of a film with all of its frames those that X-CLIP would take."""
        if isinstance(item, Film):
            modality = Modality.VIDEO
            taken = np.linspace(0, len(item.frames), FRAMES, endpoint=False).astype(int)
            frames = [Image.fromarray(item.frames[index]) for index in taken]
            made = self._processors[modality](frames, return_tensors="pt")
        elif isinstance(item, Sound):
            modality = Modality.AUDIO
            made = self._processors[modality]([item.samples], sampling_rate=item.rate, return_tensors="pt")
        else:
            modality = Modality.IMAGE
            made = self._processors[modality](images=[item], return_tensors="pt", **self._stranger.options)
        inputs = {name: made[name] for name in self._stranger.takes if name in made}
        with torch.inference_mode():
            return self._stranger.rows[modality](self._model, inputs)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _clip(side: int) -> Any:
    return models.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=_square(side))


_SIGLIP = {**TINY_VISION, "model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14}


def gemma4_config(**sounds: Any) -> Any:
    """A tiny one; `sounds` are the settings of its half for sounds, which it need not have."""
    return models.Gemma4Config(
        text_config={**TINY_LLAMA, "model_type": "gemma4_text", "head_dim": 16, "num_key_value_heads": 1,
                     "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 4},
        vision_config={"hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "head_dim": 8,
                       "num_attention_heads": 6, "num_key_value_heads": 6, "patch_size": 8,
                       "position_embedding_size": 256},
        image_token_id=60,
        **sounds,
    )  # fmt: skip


def video_llama_3_config() -> Any:
    return models.VideoLlama3Config(
        vision_config={**TINY_VISION, "patch_size": 14},
        text_config={**TINY_LLAMA, "model_type": "qwen2"},
        image_token_id=60,
        video_token_id=61,
    )


FRAMES = 8
"""Of a film, that X-CLIP is made for."""
_TENS = "ABCDEFGHIJ"
"""Chameleon spells its picture tokens' numbers so."""

STRANGERS = (
    Stranger(
        name="aya_vision",
        cls="AyaVisionForConditionalGeneration",
        config=lambda: models.AyaVisionConfig(vision_config=_SIGLIP, text_config=TINY_LLAMA, image_token_index=60),
        processors=lambda: {Modality.IMAGE: models.GotOcr2ImageProcessorPil(size=_square(112))},
        takes=("pixel_values",),
        rows={Modality.IMAGE: _pictures},
        options={"crop_to_patches": True},
    ),
    Stranger(
        name="video_llama_3",
        cls="VideoLlama3ForConditionalGeneration",
        config=video_llama_3_config,
        processors=lambda: {Modality.IMAGE: models.VideoLlama3ImageProcessorPil(patch_size=14, merge_size=2)},
        takes=("pixel_values", "image_grid_thw", "image_merge_sizes"),
        rows={Modality.IMAGE: _pictures},
    ),
    Stranger(
        name="idefics2",
        cls="Idefics2ForConditionalGeneration",
        config=lambda: models.Idefics2Config(
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14},
            perceiver_config={"hidden_size": 56, "resampler_n_latents": 5, "resampler_depth": 1,
                              "resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 1},
            text_config={**TINY_LLAMA, "model_type": "mistral"},
            image_token_id=60,
        ),
        processors=lambda: {
            Modality.IMAGE: models.Idefics2ImageProcessorPil(size={"shortest_edge": 56, "longest_edge": 112})
        },
        takes=("pixel_values", "pixel_attention_mask"),
        rows={Modality.IMAGE: _pictures},
    ),
    Stranger(
        name="metaclip_2",
        cls="MetaClip2Model",
        config=lambda: models.MetaClip2Config(
            text_config=TINY_TEXT,
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14},
            projection_dim=40,
        ),
        processors=lambda: {Modality.IMAGE: _clip(112)},
        takes=("pixel_values",),
        rows={Modality.IMAGE: _pictures},
        pooled=True,
    ),
    Stranger(
        name="florence2",
        cls="Florence2ForConditionalGeneration",
        config=lambda: models.Florence2Config(
            vision_config={"embed_dim": [16, 16, 16, 32], "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2],
                           "num_groups": [2, 2, 2, 2], "projection_dim": 32},
            text_config={"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
                         "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2,
                         "decoder_attention_heads": 2},
        ),
        processors=lambda: {Modality.IMAGE: _clip(64)},
        takes=("pixel_values",),
        rows={Modality.IMAGE: _pictures},
    ),
    Stranger(
        name="chameleon",
        cls="ChameleonForConditionalGeneration",
        config=lambda: models.ChameleonConfig(
            **{**TINY_LLAMA, "model_type": "chameleon", "vocab_size": 96},
            vq_config={"embed_dim": 16, "num_embeddings": 24, "latent_channels": 16, "resolution": 64,
                       "base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1},
            vocabulary_map={"<image>": 8, **{f"IMGIMG{_TENS[n // 10]}{_TENS[n % 10]}Z": 10 + n for n in range(24)}},
        ),
        processors=lambda: {
            Modality.IMAGE: models.ChameleonImageProcessorPil(size={"shortest_edge": 64}, crop_size=_square(64))
        },
        takes=("pixel_values",),
        rows={Modality.IMAGE: _pictures},
    ),
    Stranger(
        name="omniasr",
        cls="OmniASRForConditionalGeneration",
        config=lambda: models.OmniASRConfig(
            audio_config={"hidden_size": 48, "conv_dim": [16] * 7, "num_attention_heads": 6, "num_hidden_layers": 2,
                          "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "intermediate_size": 64},
            text_config=TINY_LLAMA,
            audio_token_id=60,
        ),
        processors=lambda: {Modality.AUDIO: models.OmniASRFeatureExtractor()},
        takes=("input_values", "padding_mask"),
        rows={Modality.AUDIO: _sounds},
    ),
    Stranger(
        name="gemma4",
        cls="Gemma4ForConditionalGeneration",
        config=lambda: gemma4_config(
            audio_config={"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
                          "subsampling_conv_channels": [128, 4], "output_proj_dims": 40},
            audio_token_id=61,
        ),
        processors=lambda: {
            Modality.IMAGE: models.Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70),
            Modality.AUDIO: models.Gemma4AudioFeatureExtractor(),
        },
        takes=("pixel_values", "image_position_ids", "input_features", "input_features_mask"),
        rows={Modality.IMAGE: _pictures, Modality.AUDIO: _masked_sounds},
    ),
    Stranger(
        name="xclip",
        cls="XCLIPModel",
        config=lambda: models.XCLIPConfig(
            text_config=TINY_TEXT,
            vision_config={**TINY_VISION, "image_size": 112, "patch_size": 14, "num_frames": FRAMES,
                           "mit_hidden_size": 32, "mit_intermediate_size": 64, "mit_num_hidden_layers": 1,
                           "mit_num_attention_heads": 2},
            projection_dim=32,
        ),
        processors=lambda: {
            Modality.VIDEO: models.VideoMAEImageProcessorPil(size={"shortest_edge": 112}, crop_size=_square(112))
        },
        takes=("pixel_values",),
        rows={Modality.VIDEO: _films},
        pooled=True,
    ),
)  # fmt: skip
