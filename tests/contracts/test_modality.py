"""What every modality in `media.registry` keeps. A new one adds a sample here, and how it is decoded."""

import io
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import audio, image, video
from spmd_encoder.media.base import Buffer, FilmLimits, Header
from spmd_encoder.media.frames import pack
from spmd_encoder.media.registry import KINDS, media_kind
from tests.harness.media import film, sound, tone

MANY_PIXELS = 10**6
LIMITS = FilmLimits(max_pixels=MANY_PIXELS, max_seconds=60, max_chosen=100, max_walked=100, max_bytes=2**24)


def _picture(seed: int = 3) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", (40, 30), random.Random(seed).randbytes(3600)).save(out, "PNG")
    return out.getvalue()


def _noise() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 255, (25, 30, 40, 3), np.uint8)


def _picture_told(data: Buffer, limit: float = MANY_PIXELS) -> Header:
    decoded = image.decode(data, int(limit))
    assert decoded.mode == "RGB"
    return Header("", decoded.width, decoded.height)


def _sound_told(data: Buffer, limit: float = 60) -> Header:
    decoded = audio.decode(data, 16_000, limit)
    assert decoded.samples.dtype == np.float32 and decoded.samples.ndim == 1
    return Header("", seconds=len(decoded.samples) / decoded.rate)


def _film_told(data: Buffer, limit: float = MANY_PIXELS) -> Header:
    decoded = video.decode(data, lambda info: range(info.num_frames), replace(LIMITS, max_pixels=int(limit)))
    assert {frame.shape for frame in decoded.frames} == {(decoded.info.height, decoded.info.width, 3)}
    assert len(decoded.frames) == len(decoded.times) == len(decoded.indices)
    return Header("", decoded.info.width, decoded.info.height, decoded.info.seconds)


@dataclass(frozen=True)
class Sample:
    """`told` decodes, under a limit, and says what a header would; `limited` is what the limit is on."""

    modality: Modality
    make: Callable[[], bytes]
    told: Callable[..., Header]
    limited: Callable[[Header], float]
    half_is_corrupt: bool = True


def _pixels(header: Header) -> float:
    return header.width * header.height


def _seconds(header: Header) -> float:
    return header.seconds


SIGNAL = tone(16_000, 16_000)
SAMPLES = {
    "PNG": Sample(Modality.IMAGE, _picture, _picture_told, _pixels),
    "WAV": Sample(Modality.AUDIO, lambda: sound("wav", "pcm_s16le", 16_000, SIGNAL), _sound_told, _seconds),
    "FLAC": Sample(Modality.AUDIO, lambda: sound("flac", "flac", 16_000, SIGNAL), _sound_told, _seconds),
    "Opus": Sample(
        Modality.AUDIO, lambda: sound("ogg", "libopus", 48_000, tone(48_000, 48_000)), _sound_told, _seconds
    ),
    "MP4": Sample(Modality.VIDEO, lambda: film("mp4", "libx264", _noise()), _film_told, _pixels),
    "WebM": Sample(Modality.VIDEO, lambda: film("webm", "libvpx-vp9", _noise()), _film_told, _pixels, False),
    "frames": Sample(Modality.VIDEO, lambda: pack([_picture(n) for n in range(4)], 2.0), _film_told, _pixels),
}


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest) -> Sample:
    return SAMPLES[request.param]


def test_every_modality_has_a_sample() -> None:
    assert {sample.modality for sample in SAMPLES.values()} == set(KINDS)


def test_probe_agrees_with_decode(sample: Sample) -> None:
    data = sample.make()
    for buffer in (data, bytearray(data), memoryview(data)):
        header, told = media_kind(sample.modality).probe(buffer), sample.told(buffer)
        assert header.format
        assert (header.width, header.height) == (told.width, told.height)
        assert header.seconds == pytest.approx(told.seconds, abs=0.05)


def test_limits_refuse_before_decoding(sample: Sample) -> None:
    data = sample.make()
    probe: Any = media_kind(sample.modality).probe
    most = sample.limited(probe(data))
    for action in (probe, sample.told):
        action(data, most)
        with pytest.raises(EncoderError, match="--max-") as caught:
            action(data, most - (1 if sample.limited is _pixels else 0.01))
        assert caught.value.code is ErrorCode.TOO_LARGE


def test_garbage_is_the_callers_fault(sample: Sample) -> None:
    kind, data = media_kind(sample.modality), sample.make()
    if sample.half_is_corrupt:
        with pytest.raises(EncoderError) as caught:
            sample.told(data[: len(data) // 2])
        assert caught.value.code is ErrorCode.MEDIA_CORRUPT
    with pytest.raises(EncoderError) as caught:
        kind.probe(data[:16] + bytes(64))
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT
    for noise in (b"", bytes(100), random.Random(5).randbytes(1000)):
        for action in (kind.probe, sample.told):
            with pytest.raises(EncoderError) as caught:
                action(noise)
            assert caught.value.code in (ErrorCode.MEDIA_CORRUPT, ErrorCode.MEDIA_UNSUPPORTED)


def test_what_is_sent_as_something_else_is_refused(sample: Sample) -> None:
    for modality in set(KINDS) - {sample.modality}:
        if {modality, sample.modality} == {Modality.AUDIO, Modality.VIDEO}:
            continue  # a film may have sound
        with pytest.raises(EncoderError) as caught:
            media_kind(modality).probe(sample.make())
        assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED


def test_a_modality_without_a_reader_is_unsupported() -> None:
    for modality in set(Modality) - set(KINDS):
        with pytest.raises(EncoderError) as caught:
            media_kind(modality)
        assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED


def test_reading_headers_needs_neither_torch_nor_ffmpeg() -> None:
    script = (
        "import sys; from spmd_encoder.media.registry import KINDS, media_kind; "
        "kinds = [media_kind(m) for m in KINDS]; import spmd_encoder.media.data_uri, spmd_encoder.media.pool; "
        "data = sys.stdin.buffer.read(); kinds[2].probe(data); "
        "print(sorted({'torch', 'transformers', 'fastapi', 'av'} & set(sys.modules)))"
    )
    data = SAMPLES["MP4"].make()
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


@pytest.mark.parametrize("name", ["WAV", "MP4"])
def test_without_the_extra_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SAMPLES[name].make()
    for module in [module for module in sys.modules if module.startswith("spmd_encoder.media.av_")]:
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(f"spmd_encoder.media.{module.rpartition('.')[2]}", raising=False)
    monkeypatch.setitem(sys.modules, "av", None)  # importing it now fails
    with pytest.raises(EncoderError, match=r"spmd-encoder\[media\]") as caught:
        SAMPLES[name].told(data)
    assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED
