"""What a modality provides. One module per modality, one line per module in `media.registry`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the keeper, which only reads headers, has no use for it
    import numpy as np
    import numpy.typing as npt

Buffer = bytes | bytearray | memoryview


class Header(NamedTuple):
    """What a file's header says. `width` and `height` in pixels, as stored (before any orientation); 0 for sounds.

    `seconds` is the length of a sound or film, 0 where the header does not tell; `frames` how many pictures a film has
    that is a list of them, else 0.
    """

    format: str
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    frames: int = 0


@dataclass(frozen=True, kw_only=True)
class Sound:
    """`samples` `[n]`, mono, from -1 to 1, at `rate` Hz."""

    samples: npt.NDArray[np.float32]
    rate: int


@dataclass(frozen=True, kw_only=True)
class FilmInfo:
    """A whole film, before frames are chosen. `fps` is the average; `width` and `height` are upright."""

    num_frames: int
    fps: float
    seconds: float
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class Film:
    """The chosen frames, each `[height, width, 3]` RGB, in order.

    `times` are seconds from the film's first frame, and `indices` their numbers in the whole film, one per frame.
    """

    frames: tuple[npt.NDArray[np.uint8], ...]
    times: tuple[float, ...]
    indices: tuple[int, ...]
    info: FilmInfo


@dataclass(frozen=True, kw_only=True)
class FilmLimits:
    """What decoding one film may take. `max_pixels` of one frame; `max_bytes` of all chosen frames together."""

    max_pixels: int
    max_seconds: float
    max_chosen: int
    max_walked: int
    max_bytes: int


class MediaKind(Protocol):
    """A module of this shape reads one modality; it has a `decode` of its own as well."""

    def probe(self, data: Buffer, max_pixels: int | None = None) -> Header:
        """Read the header only.

        Raises `EncoderError`: MEDIA_UNSUPPORTED, MEDIA_CORRUPT, or TOO_LARGE above `max_pixels` of a picture or frame.
        """
        ...
