"""Sounds against the signals that they were made of."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.audio import decode, probe
from tests.harness.media import Signal, film, sound, tone, wav

PCM = {
    "8 bits": (np.uint8, 0, lambda x: np.round(x * 127 + 128)),
    "16 bits": (np.int16, 0, lambda x: np.round(x * 32767)),
    "24 bits": (np.int32, 24, lambda x: np.round(x * (2**23 - 1)) * 256),
    "32 bits": (np.int32, 0, lambda x: np.round(x * (2**31 - 1))),
    "float32": (np.float32, 0, lambda x: x),
    "float64": (np.float64, 0, lambda x: x),
}
# Container, encoder, sample rate, options, how far off (of the signal's own loudness) its code is. LAME makes all
# quieter by 5 %.
FILES = {
    "FLAC": ("flac", "flac", 44_100, {}, 1e-4),
    "FLAC of 24 bits": ("flac", "flac", 48_000, {"sample_fmt": "s32"}, 1e-4),
    "MP3": ("mp3", "libmp3lame", 44_100, {"b": "128k"}, 0.06),
    "MP3 of MPEG-2": ("mp3", "libmp3lame", 22_050, {"b": "64k"}, 0.06),
    "MP3 without a count": ("mp3", "libmp3lame", 48_000, {"b": "128k"}, 0.06),
    "Opus": ("ogg", "libopus", 48_000, {}, 0.05),
    "Vorbis": ("ogg", "vorbis", 44_100, {"strict": "experimental"}, 0.2),
    "FLAC in Ogg": ("ogg", "flac", 44_100, {}, 1e-4),
    "M4A": ("ipod", "aac", 44_100, {"b": "128k"}, 0.02),
    "AAC": ("adts", "aac", 16_000, {"b": "64k"}, 0.02),
    "ALAC": ("mov", "alac", 44_100, {}, 1e-4),
    "PCM in MOV": ("mov", "pcm_s16le", 44_100, {}, 1e-4),
    "Opus in WebM": ("webm", "libopus", 48_000, {}, 0.05),
    "Vorbis in WebM": ("webm", "vorbis", 44_100, {"strict": "experimental"}, 0.2),
    "MP3 in Matroska": ("matroska", "libmp3lame", 44_100, {"b": "128k"}, 0.06),
    "fragments": ("mp4", "aac", 44_100, {"b": "128k"}, 0.02),
}
DETECTED = sorted(set(FILES) - {"MP3 without a count", "fragments"})
HEARD = ("MP3 without a count", "AAC", "fragments")
"""Their length is estimated or unknown before decoding."""


def refused(code: ErrorCode, action: Callable[[], object]) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        action()
    assert caught.value.code is code
    return caught.value


def make(name: str, signal: Signal) -> bytes:
    container, codec, rate, options, _ = FILES[name]
    channels = np.stack([signal, signal]) if codec == "vorbis" else signal
    data = sound(container, codec, rate, channels, options)
    if name == "MP3 without a count":
        start = data.index(b"Info" if b"Info" in data else b"Xing")
        data = data[:start] + bytes(8) + data[start + 8 :]
    if name == "fragments":
        data = fragmented(signal, rate)
    return data


def fragmented(signal: Signal, rate: int) -> bytes:
    return sound(
        "mp4", "aac", rate, signal, {"b": "128k"}, muxer={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    )


def off_by(got: np.ndarray, wanted: np.ndarray, edge: int) -> float:
    """Root mean square of the difference over that of the signal, but for `edge` samples at both ends."""
    n = min(len(got), len(wanted))
    inner = slice(edge, n - edge)
    return float(np.sqrt(np.mean((got[inner] - wanted[inner]) ** 2) / np.mean(wanted[inner] ** 2)))


@pytest.mark.parametrize("kind", PCM)
@pytest.mark.parametrize("num_channels", [1, 2, 3, 12])
def test_pcm_at_its_own_rate_is_exact(kind: str, num_channels: int) -> None:
    dtype, bits, convert = PCM[kind]
    signal = np.random.default_rng(1).uniform(-1, 1, (1000, num_channels))
    values = convert(signal).astype(dtype)
    got = decode(wav(values, 16_000, bits), 16_000, 10)
    scale = {"u": 128.0, "i": 2.0 ** (8 * values.dtype.itemsize - 1)}.get(values.dtype.kind, 1.0)
    exact = (values.astype(np.float64) - (128 if dtype is np.uint8 else 0)) / scale
    wanted = exact.mean(axis=1)
    assert got.rate == 16_000 and got.samples.dtype == np.float32
    if num_channels == 1:
        assert np.array_equal(got.samples, wanted.astype(np.float32))
    else:
        assert np.abs(got.samples - wanted).max() < 3e-7


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_its_signal(name: str) -> None:
    _, _, rate, _, tolerance = FILES[name]
    signal = tone(2 * rate, rate)
    data = make(name, signal)
    header = probe(data)
    if name in HEARD:
        assert header.seconds == 0 or abs(header.seconds - 2) < 0.2
    else:
        assert abs(header.seconds - 2) < 0.1
    got = decode(data, rate, 10).samples
    assert len(signal) <= len(got) <= len(signal) + 4096  # coders fill their last frame, some their first one
    if name in ("AAC", "fragments"):  # nobody says how much silence comes first
        got = got[1024:]
    if name == "MP3 without a count":
        got = got[1105:]
    assert off_by(got, signal, rate // 4) < tolerance
    resampled = decode(data, 16_000, 10).samples
    assert len(resampled) == math.ceil(len(decode(data, rate, 10).samples) * 16_000 / rate)


def test_channels_are_averaged() -> None:
    left, right = tone(8000, 8000, 300), tone(8000, 8000, 1100, 0.25)
    got = decode(sound("flac", "flac", 8000, np.stack([left, right])), 8000, 5).samples
    assert np.abs(got - (left + right) / 2).max() < 1e-4


@pytest.mark.parametrize("num_channels", [6, 8])
@pytest.mark.parametrize(("container", "codec"), [("flac", "flac"), ("ipod", "aac"), ("ogg", "libopus")])
def test_surround_is_averaged_too(container: str, codec: str, num_channels: int) -> None:
    tones = np.stack([tone(48_000, 48_000, 200 + 100 * index) for index in range(num_channels)])
    data = sound(container, codec, 48_000, tones, {"b": "512k"} if codec != "flac" else {})
    got = decode(data, 48_000, 5).samples
    if codec == "flac":
        assert np.abs(got - tones.mean(axis=0)).max() < 1e-4
    else:  # the channel of low frequencies loses some of its own
        assert off_by(got, tones.mean(axis=0), 4800) < 0.5


def test_the_sound_of_a_film_is_taken() -> None:
    signal = tone(48_000, 48_000)
    for container, codec in (("mp4", "aac"), ("matroska", "flac"), ("mov", "pcm_s16le")):
        data = sound(container, codec, 48_000, signal, cover=True)
        got = decode(data, 48_000, 5).samples
        assert off_by(got, signal, 4800) < 0.1


def test_a_film_without_sound_is_unsupported() -> None:
    data = film("mp4", "libx264", [np.zeros((32, 32, 3), np.uint8)] * 3)
    assert "no sound" in refused(ErrorCode.MEDIA_UNSUPPORTED, lambda: decode(data, 16_000, 5)).message


def test_a_cover_is_passed_over() -> None:
    signal = tone(44_100, 44_100)
    data = sound("mp3", "libmp3lame", 44_100, signal)
    picture = b"\0image/jpeg\0\3\0" + b"\xff\xd8\xff" + b"\xff\xfb\x90\0" * 5000
    size = len(picture) + 10
    tag = b"ID3\3\0\0" + bytes((size >> 21 & 127, size >> 14 & 127, size >> 7 & 127, size & 127))
    tag += b"APIC" + struct.pack(">I", len(picture)) + b"\0\0" + picture
    rest = data[data.index(b"\xff\xfb") :]
    assert probe(tag + rest).format == "MP3"
    assert off_by(decode(tag + rest, 44_100, 5).samples, signal, 4000) < 0.06


@pytest.mark.parametrize("declared", [0, 0xFFFFFFFF])
def test_a_wav_of_unknown_length_is_read_to_its_end(declared: int) -> None:
    values = np.arange(1000, dtype=np.int16)
    data = wav(values, 16_000, declared=declared)
    assert probe(data).seconds == pytest.approx(1000 / 16_000)
    assert np.array_equal(decode(data, 16_000, 1).samples, values / np.float32(32768))


@pytest.mark.parametrize("length", [1, 2, 7, 160])
@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 44_101, 192_000])
def test_the_shortest_sounds(length: int, rate: int) -> None:
    got = decode(wav(np.full(length, 16384, np.int16), rate), 16_000, 1).samples
    assert len(got) == math.ceil(length * 16_000 / rate)
    if rate == 16_000:
        assert np.array_equal(got, np.full(length, 0.5, np.float32))


def test_no_sample_is_corrupt() -> None:
    for data in (wav(np.zeros(0, np.int16), 16_000), wav(np.zeros(0, np.int16), 16_000, declared=0)):
        assert "no samples" in refused(ErrorCode.MEDIA_CORRUPT, lambda data=data: decode(data, 16_000, 5)).message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_numbers_that_are_not_finite_are_corrupt(bad: float, rate: int) -> None:
    values = np.zeros((2000, 2), np.float32)
    values[700, 1] = bad
    assert "finite" in refused(ErrorCode.MEDIA_CORRUPT, lambda: decode(wav(values, rate), 16_000, 5)).message


@pytest.mark.parametrize("name", DETECTED)
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_file_that_was_cut_is_not_taken_for_a_whole_one(name: str, part: float) -> None:
    rate = FILES[name][2]
    data = make(name, np.random.default_rng(2).uniform(-0.5, 0.5, 2 * rate))
    error = refused(ErrorCode.MEDIA_CORRUPT, lambda: decode(data[: int(len(data) * part)], 16_000, 10))
    assert "end" in error.message


def test_a_wav_that_was_cut() -> None:
    data = wav(np.zeros(1000, np.int16), 16_000)
    assert "ends before its end" in refused(ErrorCode.MEDIA_CORRUPT, lambda: decode(data[:-1], 16_000, 5)).message


@pytest.mark.parametrize("name", ["FLAC", "Opus", "M4A", "MP3", "AAC"])
def test_the_limit_is_held_to_while_decoding(name: str) -> None:
    rate = FILES[name][2]
    data = make(name, tone(2 * rate, rate))
    decode(data, 16_000, 2.2)
    error = refused(ErrorCode.TOO_LARGE, lambda: decode(data, 16_000, 1.5))
    assert "--max-audio-seconds" in error.message
    if name != "AAC":
        assert "--max-audio-seconds" in refused(ErrorCode.TOO_LARGE, lambda: probe(data, 1.5)).message


def test_a_forged_length_is_no_way_around_the_limit() -> None:
    data = bytearray(make("FLAC", tone(88_200, 44_100)))
    data[21] &= 0xF0  # the number of samples, 36 bits: unknown
    data[22:26] = bytes(4)
    assert probe(bytes(data)).seconds == 0
    refused(ErrorCode.TOO_LARGE, lambda: decode(bytes(data), 16_000, 1.5))
    assert len(decode(bytes(data), 44_100, 3).samples) == 88_200


@pytest.mark.parametrize("rate", [1, 999, 800_000, 2**31])
def test_absurd_rates_are_unsupported(rate: int) -> None:
    data = bytearray(wav(np.zeros(1000, np.int16), 16_000))
    struct.pack_into("<I", data, 24, rate)
    with pytest.raises(EncoderError) as caught:
        decode(bytes(data), 16_000, 1e6)
    assert caught.value.code in (ErrorCode.MEDIA_UNSUPPORTED, ErrorCode.MEDIA_CORRUPT)


def test_codes_that_are_not_listed_are_unsupported() -> None:
    data = sound("wav", "adpcm_ima_wav", 16_000, tone(16_000, 16_000))
    message = refused(ErrorCode.MEDIA_UNSUPPORTED, lambda: decode(data, 16_000, 5)).message
    assert "adpcm_ima_wav" in message and "vorbis" in message
