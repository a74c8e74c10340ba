"""Which container holds a sound or film, and what its header says: pure, and bounded in time whatever the file.

This is read for every item in the process that serves all. What is found only prices the item and refuses it early:
`decode` believes none of it but `complete`, and finds lengths and sizes out by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media import matroska, mp4, sound_files
from spmd_encoder.media.base import Buffer
from spmd_encoder.media.facts import Facts
from spmd_encoder.media.header import HeaderError, HeaderTooLongError

SOUND_FORMATS = ("WAV", "FLAC", "MP3", "OGG", "AAC", "MP4", "WEBM", "MATROSKA")
"""What sounds come in. The last three hold films, too; of these the sound track is taken."""
FILM_FORMATS = ("MP4", "WEBM", "MATROSKA")

_PICTURE_BRANDS = frozenset({b"avif", b"avis", b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1"})
_FIRST_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})


def sniff(data: Buffer) -> str | None:
    """The container that `data` claims to be, one of `SOUND_FORMATS`; never a declared type."""
    head = bytes(data[:4096])
    if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return "WAV"
    if head.startswith(b"OggS"):
        return "OGG"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return matroska.flavour(head)
    if head[4:8] in _FIRST_BOXES:
        return None if head[4:8] == b"ftyp" and head[8:12] in _PICTURE_BRANDS else "MP4"
    start = sound_files.after_id3(data)
    head = bytes(data[start : start + 4])
    if head == b"fLaC":
        return "FLAC"
    if sound_files.is_adts(head):
        return "AAC"
    return "MP3" if start or sound_files.is_mp3(head) else None


def read_facts(data: Buffer, kind: str, formats: tuple[str, ...]) -> Facts:
    """What the header of a `kind` ("sound", "film") says.

    Raises `EncoderError`: MEDIA_UNSUPPORTED where it is in none of `formats`, MEDIA_CORRUPT where it cannot be read.
    """
    if not data:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, f"the {kind} has no bytes")
    name = sniff(data)
    if name not in formats:
        raise EncoderError(
            ErrorCode.MEDIA_UNSUPPORTED,
            f"the item is not a {kind} of a known format; the formats decoded here are {', '.join(formats)}",
        )
    try:
        return _READERS[name](bytes(data))._replace(format=name)
    except HeaderTooLongError:
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT, f"the header of the {name} {kind} is longer than that of any real one"
        ) from None
    except (HeaderError, IndexError, OverflowError, ValueError, struct.error):
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT, f"the header of the {name} {kind} is damaged, or the file ends within it"
        ) from None


_READERS: Mapping[str, Callable[[bytes], Facts]] = MappingProxyType(
    {
        "WAV": sound_files.wav,
        "FLAC": sound_files.flac,
        "MP3": sound_files.mp3,
        "OGG": sound_files.ogg,
        "AAC": sound_files.aac,
        "MP4": mp4.read,
        "WEBM": matroska.read,
        "MATROSKA": matroska.read,
    }
)
