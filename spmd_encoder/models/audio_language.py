"""What families of a language model with ears share: transformers' whole class, of which tower and projector are read,
and sounds that are cut into windows of one length, of which the last is padded."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.api.types import Modality
from spmd_encoder.media.base import Sound
from spmd_encoder.models.audio import LONGEST_S, check_length, extract
from spmd_encoder.models.base import Features, Preprocessor, TowerOutput
from spmd_encoder.models.language_stand_in import LanguageStandInAdapter
from spmd_encoder.models.sharding import Split

TOWER, PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
"""Where most whole models keep the two."""
PROJECTOR_SPLIT = Split(path=PROJECTOR, columns=("linear_1",), row="linear_2")


def longest_sound(folder: Path, default: float) -> float:
    """Seconds of `max_audio_len`, a setting of whole processors, in the checkpoint in `folder`."""
    try:
        said = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
        return float(said.get("max_audio_len", default))
    except (OSError, ValueError, TypeError, AttributeError):
        return default  # none, or one that its own reader will name


class WindowPreprocessor(Preprocessor):
    """`input_features` `[windows, mel bins, frames]`, `frames` `[windows]` that are sound, and `windows` `[1]`.

    `rows` has the rows of a window by its frames; a sound of fewer than `min_frames` is refused, and one of more than
    `max_s` seconds, too.
    """

    def __init__(self, extractor: Any, rows: Callable[[int], int], *, min_frames: int, max_s: float) -> None:
        self.extractor = extractor
        self.sampling_rate = int(extractor.sampling_rate)
        self.rows = rows
        self._min_samples = (min_frames - 1) * int(extractor.hop_length) + 1
        self._max_s = max_s
        self._window_cost = int(extractor.nb_max_frames) // 2

    def cost_table(self) -> CostTable:
        window_s = float(self.extractor.chunk_length)
        most = min(self._max_s, LONGEST_S)
        return CostTable(audio=AudioCost(tokens_per_s=self._window_cost / window_s, max_s=most, step_s=window_s))

    def preprocess_audio(self, sound: Sound) -> Features:
        check_length(sound, self._max_s, min_samples=self._min_samples)
        features, frames = self.windows(sound)
        return Features(
            tensors={"input_features": features, "frames": frames, "windows": torch.tensor([len(frames)])},
            num_tokens=sum(self.rows(count) for count in frames.tolist()),
            cost=len(frames) * self._window_cost,
            modality=Modality.AUDIO,
            details={"audio_feature_length": int(frames.sum())},
        )

    def windows(self, sound: Sound) -> tuple[Tensor, Tensor]:
        """`input_features` and `frames`. The extractor gets all windows in one call, as from the whole processor."""
        made = extract(self.extractor, sound, window=int(self.extractor.n_samples))
        return made["input_features"], made["attention_mask"].sum(-1)


class AudioLanguageAdapter(LanguageStandInAdapter):
    """`tokens` `[rows, dim]` are what the whole model puts in the place of a sound's placeholders."""

    modalities = (Modality.AUDIO,)
    kept: ClassVar[tuple[str, ...]] = (TOWER, PROJECTOR)

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """The items' tensors, one after the other."""
        return {name: torch.cat([item.tensors[name] for item in items]) for name in items[0].tensors}

    @property
    def tower(self) -> Any:
        return self._model.get_submodule(TOWER)

    @property
    def projector(self) -> Any:
        return self._model.get_submodule(PROJECTOR)


class WindowAdapter(AudioLanguageAdapter):
    """Each window is encoded by itself; its rows that are padding are left out."""

    preprocessor: WindowPreprocessor

    @abstractmethod
    def encode(self, features: Tensor, frames: Tensor, windows: Sequence[int]) -> Tensor:
        """`[all windows, rows, dim]` of `[all windows, mel bins, frames]`, in the tower's dtype; `frames` of each
        window that are sound, and how many `windows` each item has."""

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        windows = batch["windows"].tolist()
        features = batch["input_features"].to(self._device, self.tower.dtype)
        rows = self.encode(features, batch["frames"].to(self._device), windows)
        counts = [self.preprocessor.rows(count) for count in batch["frames"].tolist()]
        real = [window[:count] for window, count in zip(rows, counts, strict=True)]
        outputs = []
        for count in windows:
            outputs.append(TowerOutput(tokens=torch.cat(real[:count])))
            real = real[count:]
        return outputs


TINY_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""The language half of a tiny configuration."""
