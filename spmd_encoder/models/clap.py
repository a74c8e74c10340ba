"""CLAP: one vector per sound in the space of texts, and one row per field of the spectrogram."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.clap.configuration_clap import ClapConfig
from transformers.models.clap.feature_extraction_clap import ClapFeatureExtractor
from transformers.models.clap.modeling_clap import ClapModel

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.api.types import Modality, OutputKind
from spmd_encoder.errors import StartupError
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import check_length, check_mels
from spmd_encoder.models.base import FamilyAdapter, Features, LoadContext, Preprocessor, TowerOutput
from spmd_encoder.models.contrastive import TINY_TEXT
from spmd_encoder.models.sharding import Split, TowerPlan
from spmd_encoder.models.tiny import write_random
from spmd_encoder.models.weights import from_folder, load_tower, real_bytes
from spmd_encoder.models.window_attention import WindowAttention, run_windows

ENCODER = "audio_model.audio_encoder"


class ClapPreprocessor(Preprocessor):
    """`input_features` `[1, mels, frames, mel bins]` (4 mels with fusion, else 1) and `is_longer` `[1, 1]`.

    transformers draws parts of a sound that is longer than the window (10 s) at random. Here they lie in the middle:
    with `rand_trunc` that of the sound; with `fusion` that of each third of the places where a part may begin, beside
    the whole sound scaled down. All else is the checkpoint's own extractor, asked for one sound alone: with `fusion`
    it marks a short sound that is alone as long, and fuses it with itself.
    """

    def __init__(self, extractor: Any, rows: int, cost: int) -> None:
        self.extractor = extractor
        self.sampling_rate = int(extractor.sampling_rate)
        self._rows, self._cost = rows, cost

    def cost_table(self) -> CostTable:
        window_s = float(self.extractor.max_length_s)
        return CostTable(audio=AudioCost(tokens_per_s=self._cost / window_s, min_s=window_s, max_s=window_s))

    def preprocess_audio(self, sound: Sound) -> Features:
        check_length(sound, float("inf"))
        features = self._features(sound)
        return Features(
            tensors={"input_features": features, "is_longer": torch.tensor([[self.extractor.truncation == "fusion"]])},
            num_tokens=self._rows,
            cost=self._cost,
            modality=Modality.AUDIO,
        )

    def _features(self, sound: Sound) -> Tensor:
        samples, window = sound.samples, int(self.extractor.nb_max_samples)
        if len(samples) <= window:
            return self._extract(sound, window)
        if self.extractor.truncation != "fusion":
            start = (len(samples) - window + 1) // 2
            return self._extract(Sound(samples=samples[start : start + window], rate=sound.rate), window)
        # A window as long as the sound: the spectrogram of all of it.
        whole = self._extract(sound, len(samples))[0, 0]
        count = window // int(self.extractor.hop_length) + 1
        if len(whole) == count:
            return whole.expand(1, 4, -1, -1)
        small = F.interpolate(whole[None, None], size=[count, whole.shape[1]], mode="bilinear", align_corners=False)
        parts = [whole[start : start + count] for start in middles(len(whole) - count + 1)]
        return torch.stack([small[0, 0], *parts])[None]

    def _extract(self, sound: Sound, window: int) -> Tensor:
        made: Mapping[str, Tensor] = self.extractor(
            sound.samples, sampling_rate=sound.rate, max_length=window, return_tensors="pt"
        )
        return made["input_features"]


def middles(places: int) -> list[int]:
    """The middle of each third of `places` numbers from 0 on; of an empty one 0, as transformers takes it."""
    bounds = [places // 3 * n + min(n, places % 3) for n in range(4)]
    return [low + (high - low) // 2 if low < high else 0 for low, high in pairwise(bounds)]


class ClapAdapter(FamilyAdapter):
    """`pooled` `[projection_dim]` is `get_audio_features`, of length 1. `tokens` `[fields, hidden]` is
    `last_hidden_state` of it, by frequency, then by time."""

    model_types = ("clap",)
    family = "clap"
    modalities = (Modality.AUDIO,)

    def __init__(self, model: PreTrainedModel, preprocessor: ClapPreprocessor, device: torch.device) -> None:
        self._model = model
        self.preprocessor = preprocessor
        self._device = device
        config: Any = model.config
        self.embedding_dims = {
            OutputKind.TOKENS: int(config.audio_config.hidden_size),
            OutputKind.POOLED: int(config.projection_dim),
        }
        self.tower_bytes = real_bytes(model)

    @classmethod
    def load_preprocessor(cls, folder: Path) -> ClapPreprocessor:
        extractor: Any = from_folder(ClapFeatureExtractor, folder)
        config: Any = from_folder(ClapConfig, folder)
        audio = config.audio_config
        check_mels(audio.num_mel_bins, extractor, folder)
        if audio.enable_fusion != (extractor.truncation == "fusion"):
            raise StartupError(
                f"{folder}: preprocessor_config.json cuts long sounds by {extractor.truncation}, but config.json has "
                f"enable_fusion {audio.enable_fusion}"
            )
        stride = audio.patch_stride if isinstance(audio.patch_stride, int) else audio.patch_stride[0]
        side = audio.spec_size // stride
        return ClapPreprocessor(extractor, (side // 2 ** (len(audio.depths) - 1)) ** 2, side**2)

    @classmethod
    def load(cls, folder: Path, context: LoadContext) -> ClapAdapter:
        preprocessor = cls.load_preprocessor(folder)
        config: Any = from_folder(ClapConfig, folder)
        kept = ("audio_model", "audio_projection")
        model = load_tower(ClapModel, config, folder, kept, _plan(config.audio_config), context)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):  # its statistics are no parameters
                module.to(context.dtype)
        return cls(model, preprocessor, context.device)

    def batch_key(self, features: Features) -> Hashable:
        return ()

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """`input_features` `[items, mels, frames, mel bins]` float32, `is_longer` `[items, 1]` bool."""
        return {name: torch.cat([item.tensors[name] for item in items]) for name in ("input_features", "is_longer")}

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        model: Any = self._model
        out = model.get_audio_features(
            input_features=batch["input_features"].to(self._device, model.audio_model.dtype),
            is_longer=batch["is_longer"].to(self._device),
        )
        return TowerOutput.of_batch(out.last_hidden_state.flatten(2).transpose(1, 2), out.pooler_output)

    @classmethod
    def tiny_checkpoint(cls, out: Path, seed: int) -> None:
        write_tiny(out, seed, fusion=False)


def _run_feed_forward(layer: nn.Module, hidden: Tensor) -> Tensor:
    block: Any = layer
    out: Tensor = block.output(block.intermediate(hidden))
    return out


def _plan(audio: Any) -> TowerPlan:
    """Each stage has heads of its own number; what joins patches between stages stays whole."""
    feed_forward = Split(path="", columns=("intermediate.dense",), row="output.dense", run=_run_feed_forward)
    columns = ("self.query", "self.key", "self.value")
    stages = [
        TowerPlan(
            blocks=f"{ENCODER}.layers.{stage}.blocks",
            num_blocks=depth,
            in_block=(
                feed_forward,
                Split(
                    path="attention",
                    columns=columns,
                    row="output.dense",
                    heads=int(heads),
                    run=run_windows,
                    faster=WindowAttention,
                ),
            ),
        )
        for stage, (depth, heads) in enumerate(zip(audio.depths, audio.num_attention_heads, strict=True))
    ]
    projection = Split(path="audio_projection", columns=("linear1",), row="linear2")
    first, *others = stages
    return TowerPlan(
        blocks=first.blocks,
        num_blocks=first.num_blocks,
        in_block=first.in_block,
        once=(projection,),
        others=tuple(others),
    )


def write_tiny(out: Path, seed: int, *, fusion: bool) -> None:
    """A tiny checkpoint of either kind."""
    config = ClapConfig(
        text_config={**TINY_TEXT, "projection_dim": 24, "pad_token_id": 1},
        audio_config={
            "spec_size": 128,
            "patch_embeds_hidden_size": 20,
            "hidden_size": 40,
            "projection_dim": 24,
            "depths": [2, 2],
            "num_attention_heads": [5, 10],
            "num_hidden_layers": 2,
            "enable_fusion": fusion,
        },
        projection_dim=24,
    )
    make: Any = ClapFeatureExtractor
    extractor = make(max_length_s=1, truncation="fusion" if fusion else "rand_trunc")
    write_random(ClapModel, config, extractor, out, seed)
