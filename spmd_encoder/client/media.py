"""Sounds and films as a caller passes them, and the suffixes by which files are told apart."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Literal, TypeAlias

from PIL import Image

Modality = Literal["image", "audio", "video"]
File: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, a file's bytes, a URL (`http:`, `https:` or `data:`), or the digest of a file that the server has encoded
before (`sha256:<hex>`), whose result it may still hold."""

FRAMES_FPS = 2.0
"""Of a list of frames whose rate is not said, as the server has it."""
SUFFIXES: Mapping[Modality, frozenset[str]] = MappingProxyType(
    {
        "image": frozenset(
            {
                *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif"),
                *(".bmp", ".dib", ".tif", ".tiff", ".avif"),
            }
        ),
        "audio": frozenset({".wav", ".flac", ".mp3", ".m4a", ".aac", ".ogg", ".oga", ".opus"}),
        "video": frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm"}),
    }
)
# docs/wire.md has the format.
_CLIP_HEAD, _CLIP_LENGTH = struct.Struct("<8sdI"), struct.Struct("<I")


@dataclass(frozen=True)
class Audio:
    """A sound. A path whose suffix is a sound's needs no wrapping."""

    content: File


@dataclass(frozen=True)
class Video:
    """A film, or its frames in order as files, bytes or PIL pictures.

    `fps` and `max_frames` say how the server samples a film, by default in the model's own way. Of frames `fps` is the
    rate at which they were taken (2 where it is not said); they are encoded as they are.
    """

    content: File | Sequence[File | Image.Image]
    fps: float | None = None
    max_frames: int | None = None

    @property
    def frames(self) -> Sequence[File | Image.Image] | None:
        """None where it is a file."""
        return self.content if isinstance(self.content, list | tuple) else None


@dataclass(frozen=True)
class Reading:
    """How an item is read. Without a `modality` the server looks at the file, and takes a URL or digest for a
    picture's."""

    modality: Modality | None = None
    fps: float | None = None
    max_frames: int | None = None

    @property
    def options(self) -> dict[str, float]:
        """Of the film, as the API names them."""
        given = {"fps": self.fps, "max_frames": self.max_frames}
        return {name: value for name, value in given.items() if value is not None}


def modality_of(path: str) -> Modality | None:
    """That of a sound's or film's suffix: what a picture is, its bytes say."""
    suffix = PurePath(path).suffix.lower()
    return next((modality for modality in ("audio", "video") if suffix in SUFFIXES[modality]), None)


def clip(frames: Sequence[bytes], fps: float) -> bytes:
    """Frames' files as one film for the server."""
    pieces = [_CLIP_HEAD.pack(b"SPMDCLIP", fps, len(frames))]
    for frame in frames:
        pieces += (_CLIP_LENGTH.pack(len(frame)), frame)
    return b"".join(pieces)
