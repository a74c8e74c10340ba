"""What the Qwen-Omni families share: a tower for pictures and films, one for sounds, and one adapter over both."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from spmd_encoder.api.cost import AudioCost, CostTable
from spmd_encoder.api.types import Detail, Modality
from spmd_encoder.media.base import Film, Sound
from spmd_encoder.models.audio import check_mels
from spmd_encoder.models.base import Features, TowerOutput
from spmd_encoder.models.film_settings import FilmMaker, FilmSettings
from spmd_encoder.models.qwen_video import Qwen2Films
from spmd_encoder.models.qwen_vl import TOWER, QwenPreprocessor, QwenVLAdapter, patches_of
from spmd_encoder.models.sharding import TowerPlan
from spmd_encoder.models.video import sampled_fps
from spmd_encoder.models.weights import from_folder

AUDIO_TOWER = "model.audio_tower"


class OmniFilms(Qwen2Films):
    """`Qwen2VLVideoProcessor`, as the families' whole processors call it.

    A film's sound is an item of its own: the same file as `audio`.
    """

    longest_edge: ClassVar[int]
    """Pixels of a frame at most. The whole processor gives it, and `shortest_edge` a sixth of it, whatever the video
    processor's own file says."""

    @classmethod
    def known(cls, settings: FilmSettings) -> FilmSettings:
        return settings.but(size={"shortest_edge": cls.longest_edge // 6, "longest_edge": cls.longest_edge})

    def details(self, film: Film) -> dict[str, Detail]:
        fps = sampled_fps(film, self.sampling.usual_fps)
        return {"sampled_fps": fps, "video_second_per_grid": self.step / fps}


class OmniSounds(ABC):
    """The part of a preprocessor that makes features of sounds, with the checkpoint's extractor."""

    def __init__(self, extractor: Any, audio: Any) -> None:
        """`audio` is the audio tower's configuration."""
        self.extractor = extractor
        self.sampling_rate = int(extractor.sampling_rate)
        self.hop = int(extractor.hop_length)
        self.chunk = 2 * int(audio.n_window)

    @abstractmethod
    def cost(self) -> AudioCost: ...

    @abstractmethod
    def features(self, sound: Sound) -> Features: ...


class OmniPreprocessor(QwenPreprocessor):
    """Pictures and films as in Qwen-VL, and sounds."""

    def __init__(self, processor: Any, films: FilmMaker, sounds: OmniSounds) -> None:
        super().__init__(processor, films)
        self.sounds = sounds
        self.sampling_rate = sounds.sampling_rate

    def cost_table(self) -> CostTable:
        return replace(super().cost_table(), audio=self.sounds.cost())

    def preprocess_audio(self, sound: Sound) -> Features:
        return self.sounds.features(sound)


class OmniAdapter(QwenVLAdapter):
    """`tokens` of each item are what the thinker puts in the place of its placeholders."""

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)
    kept = (TOWER, AUDIO_TOWER)
    sounds: ClassVar[type[OmniSounds]]

    @classmethod
    def load_preprocessor(cls, folder: Path) -> OmniPreprocessor:
        config: Any = from_folder(cls.config_class, folder)
        pictures = from_folder(Qwen2VLImageProcessorPil, folder)
        extractor: Any = from_folder(WhisperFeatureExtractor, folder)
        check_mels(config.audio_config.num_mel_bins, extractor, folder)
        films = cls.films.load(folder, patches_of(pictures))
        return OmniPreprocessor(pictures, films, cls.sounds(extractor, config.audio_config))

    @classmethod
    def whole_plan(cls, config: Any) -> TowerPlan:
        return replace(cls.plan(config.vision_config), others=(cls.audio_plan(config.audio_config),))

    @classmethod
    @abstractmethod
    def audio_plan(cls, audio: Any) -> TowerPlan:
        """How an audio tower with this configuration is cut."""

    def pack(self, items: Sequence[Features]) -> dict[str, Tensor]:
        if items[0].modality is Modality.AUDIO:
            return self.pack_sounds(items)
        return super().pack(items)

    def forward(self, batch: Mapping[str, Tensor]) -> list[TowerOutput]:
        if "input_features" in batch:
            inputs = {name: tensor.to(self._device) for name, tensor in batch.items()}
            return [TowerOutput(tokens=rows) for rows in self.sound_rows(inputs)]
        return super().forward(batch)

    @abstractmethod
    def pack_sounds(self, items: Sequence[Features]) -> dict[str, Tensor]:
        """A batch of sounds; it has `input_features`."""

    @abstractmethod
    def sound_rows(self, batch: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Each sound's rows."""


def save_extractor(extractor: Any, out: Path) -> None:
    """Add an extractor's settings to the file of the picture processor, where real checkpoints have both."""
    path = out / "preprocessor_config.json"
    both = {**extractor.to_dict(), **json.loads(path.read_text(encoding="utf-8"))}
    path.write_text(json.dumps(both, indent=2, sort_keys=True) + "\n", encoding="utf-8")
