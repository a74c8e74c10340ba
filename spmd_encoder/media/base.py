"""What a modality provides. One module per modality, one line per module in `media.registry`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from PIL import Image

Buffer = bytes | bytearray | memoryview


class Header(NamedTuple):
    """What a file's header says. `width` and `height` in pixels, as stored (before any orientation)."""

    format: str
    width: int
    height: int


class MediaKind(Protocol):
    """A module of this shape reads one modality."""

    def probe(self, data: Buffer, max_pixels: int | None = None) -> Header:
        """Read the header only.

        Raises `EncoderError`: MEDIA_UNSUPPORTED, MEDIA_CORRUPT, or TOO_LARGE above `max_pixels`.
        """
        ...

    def decode(self, data: Buffer, max_pixels: int | None = None) -> Image.Image:
        """Decode to upright 8-bit RGB. Raises as `probe` does; anything cut short is MEDIA_CORRUPT."""
        ...
