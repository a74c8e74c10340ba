"""Headers of files that hold nothing but sound: WAV, FLAC, MP3, Ogg and AAC (ADTS). Pure and bounded in time.

Each reader raises `HeaderError` or `HeaderTooLongError`; where the file ends too early, also IndexError or
struct.error.
"""

from __future__ import annotations

import struct

from spmd_encoder.media.base import Buffer
from spmd_encoder.media.facts import Facts
from spmd_encoder.media.header import MAX_PARTS, HeaderError, parts

_MAX_ID3_TAGS = 8
_MP3_WINDOW = 64 * 1024
"""Most bytes before the first frame of an MP3, as libavformat has it."""
_OGG_WINDOW = 4 * 65_307
"""The last pages of an Ogg file are looked for in so many bytes; a page has 65,307 at most."""
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)
_WHOLE_SAMPLES = frozenset({1, 3, 6, 7, 0xFFFE})
"""Formats of a WAV whose blocks are one sample each: PCM, float, A-law, mu-law, extensible."""

_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_KBITS = (
    (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # MPEG-1
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG-2 and 2.5
)


def wav(data: bytes) -> Facts:
    """RIFF, RF64 and BW64. Without a size of its samples (as of a stream) the file is taken to its end."""
    position, long_size, layout = 12, 0, (0, 0, 0, 0)
    for _ in parts():
        kind, size = struct.unpack_from("<4sI", data, position)
        position += 8
        if kind == b"ds64":
            (long_size,) = struct.unpack_from("<Q", data, position + 8)
        elif kind == b"fmt ":
            tag, _, rate, byte_rate, align = struct.unpack_from("<HHIIH", data, position)
            layout = tag, rate, byte_rate, align
        elif kind == b"data":
            break
        position += size + size % 2
    tag, rate, byte_rate, align = layout
    if not rate:
        raise HeaderError("there is no format")
    per_second = rate * align if tag in _WHOLE_SAMPLES else byte_rate
    present = len(data) - position
    if long_size and size == 0xFFFFFFFF:
        size = long_size
    elif size in _UNKNOWN_SIZES:
        size = present
    return Facts(seconds=size / per_second if per_second else 0.0, complete=size <= present)


def flac(data: bytes) -> Facts:
    rate, total = _stream_info(data, after_id3(data) + 8)
    return Facts(seconds=total / rate, samples=total)


def _stream_info(data: bytes, start: int) -> tuple[int, int]:
    """(rate, number of samples or 0) from the STREAMINFO of a FLAC stream."""
    (packed,) = struct.unpack_from(">Q", data, start + 10)
    rate, total = packed >> 44, packed & (1 << 36) - 1
    if not rate:
        raise HeaderError("the sample rate is missing")
    return rate, total


def mp3(data: bytes) -> Facts:
    """By the frame count that most encoders write (Xing, Info, VBRI), else by the first frame's bit rate."""
    start = after_id3(data)
    for position in range(start, min(len(data) - 3, start + _MP3_WINDOW)):
        if data[position] != 0xFF or (frame := _mp3_frame(data, position)) is None:
            continue
        size, num_samples, rate, side = frame
        if position + size + 4 <= len(data) and _mp3_frame(data, position + size) is None:
            continue
        return _mp3_counted(data, position, position + side, num_samples / rate) or Facts(
            seconds=(len(data) - position) / size * num_samples / rate
        )
    raise HeaderError("there is no frame")


def _mp3_counted(data: bytes, start: int, tag: int, frame_seconds: float) -> Facts | None:
    if data[tag : tag + 4] in (b"Xing", b"Info"):
        flags, first, second = struct.unpack_from(">III", data, tag + 4)
        count = first if flags & 1 else 0
        num_bytes = (second if flags & 1 else first) if flags & 2 else 0
    elif data[start + 36 : start + 40] == b"VBRI":
        num_bytes, count = struct.unpack_from(">II", data, start + 46)
    else:
        return None
    return Facts(seconds=count * frame_seconds, complete=start + num_bytes <= len(data))


def _mp3_frame(data: bytes, position: int) -> tuple[int, int, int, int] | None:
    """(bytes, samples, rate, where a Xing tag would be) of the frame whose header is there, or None."""
    (word,) = struct.unpack_from(">I", data, position)
    version, layer = word >> 19 & 3, word >> 17 & 3
    kbits, rate = word >> 12 & 15, word >> 10 & 3
    if word >> 21 != 0x7FF or version == 1 or layer != 1 or kbits in (0, 15) or rate == 3:
        return None
    old = version != 3  # MPEG-2 or 2.5: half the samples in a frame
    hertz = _MP3_RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    size = (72_000 if old else 144_000) * _MP3_KBITS[old][kbits - 1] // hertz + (word >> 9 & 1)
    is_mono = word >> 6 & 3 == 3
    side = (13 if is_mono else 21) if old else (21 if is_mono else 36)
    return size, 576 if old else 1152, hertz, side


def is_mp3(head: bytes) -> bool:
    return len(head) >= 4 and _mp3_frame(head, 0) is not None


def aac(data: bytes) -> Facts:
    """ADTS has no header of the whole: its length is unknown."""
    if not is_adts(data[after_id3(data) :][:4]):
        raise HeaderError("there is no frame")
    return Facts()


def is_adts(head: bytes) -> bool:
    return len(head) >= 3 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 and head[2] >> 2 & 15 < 13


def ogg(data: bytes) -> Facts:
    """The first stream in a known code of sound: its rate from its first page, its length from its last one."""
    position, found = 0, None
    for _ in parts():
        content, end, flags, serial, _ = _ogg_page(data, position)
        if not flags & 2:  # no beginning of a stream
            break
        found = found or _ogg_rate(data, content, serial)
        position = end
    if found is None:
        return Facts()
    rate, skipped, serial = found
    last, complete = _ogg_last(data, serial)
    return Facts(seconds=max(0, last - skipped) / rate, complete=complete)


def _ogg_page(data: bytes, position: int) -> tuple[int, int, int, int, int]:
    """(start of its content, its end, flags, serial number, granule position)."""
    magic, _, flags, granule, serial, _, _, segments = struct.unpack_from("<4sBBqIIIB", data, position)
    if magic != b"OggS":
        raise HeaderError("there is no page")
    content = position + 27 + segments
    return content, content + sum(data[position + 27 : content]), flags, serial, granule


def _ogg_rate(data: bytes, content: int, serial: int) -> tuple[int, int, int] | None:
    """(rate, samples that are skipped, serial number) where the stream is sound."""
    rate = skipped = 0
    if data.startswith(b"\x01vorbis", content):
        (rate,) = struct.unpack_from("<I", data, content + 12)
    elif data.startswith(b"OpusHead", content):
        rate = 48_000
        (skipped,) = struct.unpack_from("<H", data, content + 10)
    elif data.startswith(b"\x7fFLAC", content):
        rate, _ = _stream_info(data, content + 17)
    return (rate, skipped, serial) if rate else None


def _ogg_last(data: bytes, serial: int) -> tuple[int, bool]:
    """The stream's last position, and whether the file's last page of it says that it is the last."""
    position, low = len(data), max(0, len(data) - _OGG_WINDOW)
    for _ in range(MAX_PARTS):
        position = data.rfind(b"OggS", low, position)
        if position < 0:
            break
        try:
            _, end, flags, number, granule = _ogg_page(data, position)
        except struct.error:
            return 0, False
        if end > len(data):
            return 0, False
        if number == serial and granule >= 0:
            return granule, bool(flags & 4)
    return 0, False


def after_id3(data: Buffer) -> int:
    """Where the file goes on after ID3 tags before it."""
    position = 0
    for _ in range(_MAX_ID3_TAGS):
        head = bytes(data[position : position + 10])
        if len(head) < 10 or head[:3] != b"ID3" or max(head[6:]) > 127:
            break
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        position += 10 + size + (10 if head[5] & 16 else 0)
    return position
