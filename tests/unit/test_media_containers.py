"""Headers of sounds and films: what they say, and an end to files that are all header."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import audio, video
from spmd_encoder.media.container import SOUND_FORMATS, read_facts, sniff
from tests.harness.media import film, sound, tone, wav

MANY = 100_000


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content) + 8) + kind + content


def page(content: bytes, flags: int = 2, serial: int = 1, granule: int = 0) -> bytes:
    head = struct.pack("<4sBBqIIIB", b"OggS", 0, flags, granule, serial, 0, 0, 1)
    return head + bytes([len(content)]) + content


def matroska(*elements: bytes) -> bytes:
    """An EBML header that says webm, and a segment of unknown size."""
    return b"\x1aE\xdf\xa3\x87\x42\x82\x84webm" + b"\x18S\x80g\x01" + b"\xff" * 7 + b"".join(elements)


ENDLESS = {
    "chunks of a WAV": b"RIFF\0\0\0\0WAVE" + b"abcd\0\0\0\0" * MANY,
    "boxes of a file": box(b"ftyp", b"isom") + box(b"free", b"") * MANY,
    "boxes of a movie": box(b"ftyp", b"isom") + box(b"moov", box(b"free", b"") * MANY),
    "boxes of a track": box(b"ftyp", b"isom") + box(b"moov", box(b"trak", box(b"mdia", box(b"free", b"") * MANY))),
    "tables of tracks": box(b"ftyp", b"isom") + box(b"moov", box(b"trak", box(b"mdia", box(b"minf", b"") * 4000)) * 25),
    "tracks in tracks": matroska((b"\x16T\xaek\x10\x1f\x40\x00" + b"\xae\x80" * 1_000_000) * 2),
    "beginnings of streams": page(b"unknown") * MANY,
    "elements of a segment": matroska(b"\xec\x80" * MANY),
}


@pytest.mark.parametrize("data", ENDLESS.values(), ids=ENDLESS)
def test_files_that_are_all_header_are_refused(data: bytes) -> None:
    with pytest.raises(EncoderError, match="longer than that of any real one") as caught:
        read_facts(data, "sound", SOUND_FORMATS)
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT


def test_boxes_within_boxes_are_followed_as_deep_as_real_ones() -> None:
    nested = b""
    for _ in range(3000):
        nested = box(b"mdia", nested)
    with pytest.raises(EncoderError) as caught:
        video.probe(box(b"ftyp", b"isom") + box(b"moov", box(b"trak", nested)))
    assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED


ODD = {
    "no movie": box(b"ftyp", b"isom") + box(b"mdat", bytes(100)),
    "no tracks": matroska(b"\xec\x81\0"),
    "a tag and nothing else": b"ID3\3\0\0\0\0\0\x7f" + bytes(200),
    "a tag beyond the end": b"ID3\3\0\0\x7f\x7f\x7f\x7f" + bytes(200),
    "no format": b"RIFF\0\0\0\0WAVEdata" + bytes(50),
    "half a page": page(b"OpusHead")[:20],
    "half a FLAC": b"fLaC\0\0\0\x22" + bytes(8),
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_damaged_headers_are_corrupt(data: bytes) -> None:
    with pytest.raises(EncoderError) as caught:
        audio.probe(data)
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT


PICTURES = [np.zeros((32, 48, 3), np.uint8)] * 25
FOUND = {
    "WAV": wav(np.zeros(16_000, np.int16), 16_000),
    "FLAC": sound("flac", "flac", 16_000, tone(16_000, 16_000)),
    "MP3": sound("mp3", "libmp3lame", 16_000, tone(16_000, 16_000)),
    "OGG": sound("ogg", "libopus", 16_000, tone(16_000, 16_000)),
    "AAC": sound("adts", "aac", 16_000, tone(16_000, 16_000)),
    "MP4": film("mov", "libx264", PICTURES),
    "WEBM": film("webm", "libvpx", PICTURES),
    "MATROSKA": film("matroska", "libx264", PICTURES),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_content_tells_the_container(name: str) -> None:
    assert sniff(FOUND[name]) == name
    tag = b"ID3\4\0\0\0\0\1\0" + bytes(128)
    if name in ("FLAC", "MP3", "AAC"):
        assert sniff(tag + FOUND[name]) == name
        assert len(audio.decode(tag + FOUND[name], 16_000, 5).samples) >= 16_000


@pytest.mark.parametrize("brand", [b"avif", b"heic", b"mif1"])
def test_pictures_are_no_films(brand: bytes) -> None:
    with pytest.raises(EncoderError) as caught:
        video.probe(box(b"ftyp", brand + bytes(4)) + bytes(100))
    assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED


def test_a_wav_of_more_than_four_gigabytes() -> None:
    """RF64 has its sizes in 64 bits; this one says so of a second."""
    data = bytearray(FOUND["WAV"])
    data[:4], data[40:44] = b"RF64", b"\xff" * 4
    sizes = struct.pack("<QQQI", len(data) - 8, 32_000, 16_000, 0)
    data[12:12] = b"ds64" + struct.pack("<I", len(sizes)) + sizes
    assert audio.probe(bytes(data)).seconds == 1.0
    assert len(audio.decode(bytes(data), 16_000, 5).samples) == 16_000
    assert not read_facts(bytes(data[:-2]), "sound", SOUND_FORMATS).complete


def test_an_mp3_by_frauenhofers_count() -> None:
    data = bytearray(FOUND["MP3"])
    start = data.index(b"\xff", data.index(b"Lavf") if b"Lavf" in data[:200] else 0)
    for at in range(start, start + 4):
        if data[at] == 0xFF and data[at + 1] & 0xE0 == 0xE0:
            start = at
            break
    data[start + 4 : start + 60] = bytes(56)
    data[start + 36 : start + 54] = b"VBRI" + struct.pack(">HHHII", 1, 0, 0, len(data) - start, 40)
    assert audio.probe(bytes(data)).seconds == pytest.approx(40 * 576 / 16_000)


def test_lengths_in_64_bits() -> None:
    """The second version of a movie header."""
    moov = FOUND["MP4"].index(b"moov") - 4
    old = FOUND["MP4"][moov + 8 :]
    (size,) = struct.unpack_from(">I", old)
    rest = old[28:size]
    header = box(b"mvhd", struct.pack(">B3xQQIQ", 1, 0, 0, 1000, 7_500) + rest)
    data = FOUND["MP4"][:moov] + box(b"moov", header + old[size:])
    assert video.probe(data)[1:4] == (48, 32, 7.5)


def test_the_length_of_fragments() -> None:
    data = film("mp4", "libx264", PICTURES, muxer={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
    assert video.probe(data).seconds == 0
    index = struct.pack(">IIIII", 0, 1, 1000, 0, 0) + struct.pack(">HH", 0, 2) + struct.pack(">III", 9, 600, 0) * 2
    start = data.index(b"moof") - 4
    assert video.probe(data[:start] + box(b"sidx", index) + data[start:]).seconds == pytest.approx(1.2)


def test_a_film_that_is_sent_as_a_sound_is_read_for_its_length() -> None:
    header = audio.probe(FOUND["MP4"])
    assert header[:4] == ("MP4", 0, 0, pytest.approx(1.0))


def test_codes_that_ogg_may_hold_too_are_named() -> None:
    data = page(b"Speex   1.2" + bytes(69)) + page(b"x", flags=4, granule=100)
    assert audio.probe(data).seconds == 0
    with pytest.raises(EncoderError) as caught:
        audio.decode(data, 16_000, 5)
    assert caught.value.code in (ErrorCode.MEDIA_UNSUPPORTED, ErrorCode.MEDIA_CORRUPT)
