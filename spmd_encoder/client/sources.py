"""What a caller may pass as a picture, and how it becomes bytes for the wire."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from PIL import ExifTags, Image

from spmd_encoder.client.errors import ItemError
from spmd_encoder.client.files import read_regular

ImageLike: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image
"""A path, a file's bytes, a PIL picture, a URL (`http:`, `https:` or `data:`), or the digest of a file that the server
has encoded before (`sha256:<hex>`), whose result it may still hold."""

UNREADABLE = "UNREADABLE"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_URL = re.compile(r"(https?://|data:)", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One picture before it is read. `size_bytes` is what it is expected to take on the wire; one of `url`, `digest`
    and `read` is set.

    A URL is fetched by the server, never here.
    """

    index: int
    name: str
    size_bytes: int
    url: str | None = None
    read: Callable[[], bytes] | None = None
    digest: str | None = None

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


def source_of(image: ImageLike, index: int) -> Source:
    """Raises TypeError for what is no picture; a file is opened only when its turn comes."""
    nameless = f"images[{index}]"
    match image:
        case str() if _URL.match(image):
            name = image if image[:5].lower() != "data:" else nameless
            return Source(index, name, len(image), url=image)
        case str() if DIGEST.fullmatch(image):
            return Source(index, image, len(image), digest=image)
        case str() | os.PathLike():
            path = os.fspath(image)
            return Source(index, path, _file_size(path), read=lambda: read_regular(path))
        case bytes() | bytearray() | memoryview():
            return Source(index, nameless, len(image), read=lambda: bytes(image))
        case Image.Image():
            raw_bytes = image.width * image.height * len(image.getbands())
            return Source(index, nameless, raw_bytes, read=lambda: _png(image))
        case _:
            raise TypeError(
                f"{nameless} is a {type(image).__name__}; a picture is a path, bytes, a PIL.Image or a URL string"
            )


def reject_single(images: object) -> None:
    """Raises TypeError where one picture came in the place of a list of pictures."""
    if isinstance(images, str | os.PathLike | bytes | bytearray | memoryview | Image.Image):
        raise TypeError(f"expected a list of pictures, got one {type(images).__name__}; put it in a list: [picture]")


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
