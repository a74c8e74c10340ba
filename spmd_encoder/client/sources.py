"""What a caller may pass as an item, and how it becomes bytes for the wire."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from PIL import ExifTags, Image

from spmd_encoder.client.errors import ItemError
from spmd_encoder.client.files import read_regular
from spmd_encoder.client.media import FRAMES_FPS, Audio, File, Modality, Reading, Video, clip, modality_of

MediaLike: TypeAlias = File | Image.Image | Audio | Video
"""A picture as a file or from PIL, or a sound or film."""

UNREADABLE = "UNREADABLE"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DECLARED = re.compile(r"data:(audio|video)/", re.IGNORECASE)
_URL_END = re.compile(r"[?#]")
_URL = re.compile(r"(https?://|data:)", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One item before it is read. `size_bytes` is what it is expected to take on the wire; one of `url`, `digest`
    and `read` is set.

    A URL is fetched by the server, never here.
    """

    index: int
    name: str
    size_bytes: int
    url: str | None = None
    read: Callable[[], bytes] | None = None
    digest: str | None = None
    reading: Reading = field(default_factory=Reading)

    @property
    def group(self) -> tuple[bool, dict[str, float]]:
        """What share a request have this alike: files' options are those of the whole request."""
        return self.is_here, self.reading.options if self.is_here else {}

    @property
    def is_here(self) -> bool:
        """It has bytes to be sent, and is not only named."""
        return self.read is not None

    def load(self) -> bytes:
        """The file's bytes. Blocks. Raises `ItemError` UNREADABLE."""
        assert self.read is not None, "a URL has no bytes here"
        try:
            data = self.read()
        except OSError as error:
            raise self.failure(error.strerror or str(error)) from None
        except ValueError as error:  # of `read_regular` or `_png`
            raise self.failure(str(error)) from None
        if not data:
            raise self.failure("it is empty")
        return data

    def failure(self, why: str) -> ItemError:
        return ItemError(why, code=UNREADABLE, index=self.index, name=self.name)


def source_of(image: MediaLike, index: int) -> Source:
    """Raises TypeError for what is no item, ValueError for frames with `max_frames`; a file is opened only when its
    turn comes."""
    match image:
        case Audio(content=content):
            return replace(_file(content, index), reading=Reading("audio"))
        case Video(frames=None, content=content):
            reading = Reading("video", image.fps, image.max_frames)
            return replace(_file(content, index), reading=reading)
        case Video():
            return _frames(image, index)
        case _:
            return _file(image, index)


def _frames(video: Video, index: int) -> Source:
    frames = [_file(frame, index) for frame in video.frames or ()]
    name = f"images[{index}]"
    if not all(frame.is_here for frame in frames):
        raise TypeError(f"a frame of {name} is a URL or digest; frames are files, bytes or PIL pictures")
    if video.max_frames is not None or not frames:
        raise ValueError(f"{name} must have frames, all of which are encoded, so `max_frames` is for files alone")
    fps = FRAMES_FPS if video.fps is None else video.fps

    def read() -> bytes:
        return clip([frame.load() for frame in frames], fps)

    size = sum(frame.size_bytes for frame in frames)
    return Source(index, name, size, read=read, reading=Reading("video"))


def _file(image: object, index: int) -> Source:
    nameless = f"images[{index}]"
    match image:
        case str() if _URL.match(image):
            name = image if image[:5].lower() != "data:" else nameless
            return Source(index, name, len(image), url=image, reading=Reading(named_modality(image)))
        case str() if DIGEST.fullmatch(image):
            return Source(index, image, len(image), digest=image)
        case str() | os.PathLike():
            path = os.fspath(image)
            reading = Reading(named_modality(path))
            return Source(index, path, _file_size(path), read=lambda: read_regular(path), reading=reading)
        case bytes() | bytearray() | memoryview():
            return Source(index, nameless, len(image), read=lambda: bytes(image))
        case Image.Image():
            raw_bytes = image.width * image.height * len(image.getbands())
            return Source(index, nameless, raw_bytes, read=lambda: _png(image))
        case _:
            raise TypeError(
                f"{nameless} is a {type(image).__name__}; an item is a path, bytes, a PIL.Image, a URL string, "
                "Audio or Video"
            )


def named_modality(name: str) -> Modality | None:
    """What a path, URL or data URI shows by itself to be a sound or a film."""
    if (declared := _DECLARED.match(name)) is not None:
        return "audio" if declared[1].lower() == "audio" else "video"
    return modality_of(_URL_END.split(name, 1)[0] if _URL.match(name) else name)


def reject_single(images: object) -> None:
    """Raises TypeError where one item came in the place of a list of items."""
    if isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | Audio | Video):
        raise TypeError(f"expected a list of items, got one {type(images).__name__}; put it in a list: [item]")


def _file_size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except (OSError, ValueError):  # said when it is read
        return 0


def _png(image: Image.Image) -> bytes:
    """Lossless, and quick rather than small. The orientation goes with it: the server turns every picture upright.

    Raises ValueError for a mode that PNG lacks, or a lazily opened file that is damaged.
    """
    exif = Image.Exif()
    out = io.BytesIO()
    try:
        if (orientation := image.getexif().get(ExifTags.Base.Orientation)) is not None:
            exif[ExifTags.Base.Orientation] = orientation
        image.save(out, "PNG", compress_level=1, exif=exif)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"it cannot be written as PNG ({error}); send its file, or convert it to RGB") from None
    return out.getvalue()
