"""What a server says that it takes: what its libraries decode, within what its checkpoint's settings allow."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from PIL import features

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import StartupError
from spmd_encoder.media.capabilities import decoders, without_decoder
from spmd_encoder.models import registry
from spmd_encoder.models.base import FamilyAdapter, LoadContext
from spmd_encoder.models.loading import adapter_class, load_adapter, served_modalities


@pytest.fixture
def no_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith("spmd_encoder.media.av_")]:
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(f"spmd_encoder.media.{module.rpartition('.')[2]}", raising=False)
    monkeypatch.setitem(sys.modules, "av", None)  # importing it now fails


def loaded(family: str, folder: Path, context: LoadContext) -> FamilyAdapter:
    entry = next(entry for entry in registry.FAMILIES if entry.family == family)
    adapter_class(entry).tiny_checkpoint(folder, seed=1)
    return load_adapter(folder, context)


def test_all_that_is_decoded_is_told() -> None:
    told = decoders()
    assert told["video_codecs"] == ["h264", "hevc", "vp8", "vp9", "av1"]
    assert {"mp3", "aac", "opus", "vorbis", "flac", "pcm_s16le"} <= {*told["audio_codecs"]}
    assert {"MP4", "WEBM"} <= {*told["video_formats"]} and {"WAV", "MP4"} <= {*told["audio_formats"]}
    assert ("AVIF" in told["image_formats"]) is bool(features.check("avif"))
    assert str(told["pyav"])[0].isdigit() and str(told["pillow"])[0].isdigit()
    assert str(told["torchvision"]).startswith("not used")


def test_a_model_for_pictures_is_told_of_without_loading_ffmpeg(no_pyav: None) -> None:
    told = decoders([Modality.IMAGE])
    assert "JPEG" in told["image_formats"] and str(told["pyav"])[0].isdigit()
    assert not [name for name in told if name.startswith(("audio", "video"))]
    assert not without_decoder([Modality.IMAGE])


def test_without_the_extra_no_codec_is_told(no_pyav: None) -> None:
    told = decoders()
    assert [told[f"{kind}_{what}"] for kind in ("audio", "video") for what in ("formats", "codecs")] == [[]] * 4
    assert {*without_decoder(Modality)} == {Modality.AUDIO, Modality.VIDEO}


def test_a_family_of_films_offers_them_and_says_nothing(
    tmp_path: Path, context: LoadContext, caplog: pytest.LogCaptureFixture
) -> None:
    assert served_modalities(loaded("internvl", tmp_path, context)) == (Modality.IMAGE, Modality.VIDEO)
    assert not caplog.records


def test_films_are_not_offered_where_the_checkpoint_settings_do_not_fit(
    tmp_path: Path, context: LoadContext, caplog: pytest.LogCaptureFixture
) -> None:
    loaded("internvl", tmp_path, context)
    settings = {"size": {"height": 56, "width": 56}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        assert served_modalities(load_adapter(tmp_path, context)) == (Modality.IMAGE,)
    assert "no video is offered: " in caplog.text and "(56, 56)" in caplog.text


def test_sounds_and_films_are_not_offered_without_the_extra(
    tmp_path: Path, context: LoadContext, caplog: pytest.LogCaptureFixture, no_pyav: None
) -> None:
    with caplog.at_level(logging.WARNING):
        assert served_modalities(loaded("qwen2_5_omni", tmp_path, context)) == (Modality.IMAGE,)
    for kind in ("audio", "video"):
        assert f"no {kind} is offered: " in caplog.text
    assert caplog.text.count("pip install 'spmd-encoder[media]'") == 2


def test_a_model_of_sounds_alone_does_not_start_without_the_extra(
    tmp_path: Path, context: LoadContext, no_pyav: None
) -> None:
    with pytest.raises(StartupError, match=r"nothing .*audio: PyAV .*spmd-encoder\[media\]"):
        served_modalities(loaded("whisper", tmp_path, context))
