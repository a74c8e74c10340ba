"""PyAV (FFmpeg's libraries), opened on a stranger's file: by one demuxer, with few decoders, within bounds.

FFmpeg knows some three hundred containers, several of which name other files to open, and as many codecs. Here the
demuxer is the one that the content was recognised as, nothing else may be opened, and what is decoded is listed.
Imported by `decode` alone: these are native parsers, and belong in a process that may be lost.
"""

from __future__ import annotations

import contextlib
import io
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import av
from av.container import InputContainer
from av.stream import Discard, Stream

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Buffer
from spmd_encoder.media.facts import Facts

log = logging.getLogger(__name__)

DEMUXERS = MappingProxyType(
    {
        "WAV": "wav",
        "FLAC": "flac",
        "MP3": "mp3",
        "OGG": "ogg",
        "AAC": "aac",
        "MP4": "mov",
        "WEBM": "matroska",
        "MATROSKA": "matroska",
    }
)
MOST_STREAMS = 100
OWN_BYTES = 512 * 2**20
"""What libraries may take for themselves, beside what grows with the item."""


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Whatever FFmpeg or numpy raises becomes an `EncoderError` without its words, which may quote the file."""
    try:
        yield
    except EncoderError:
        raise
    except MemoryError:
        raise EncoderError(ErrorCode.TOO_LARGE, f"the {what} takes more memory to decode than is given to it") from None
    except Exception as error:
        log.debug("decoding a %s failed with %s", what, type(error).__name__)
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT, f"the {what} cannot be decoded: it is damaged or ends before its end"
        ) from None


@contextlib.contextmanager
def memory_bound(more_bytes: int) -> Iterator[None]:
    """Let the process grow by `more_bytes` of address space and no more.

    A table of a few bytes can make a demuxer ask for gigabytes. FFmpeg takes a refused allocation for an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # no Linux
        yield
        return
    limit = pages * resource.getpagesize() + more_bytes
    within = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *within]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def opened(
    data: Buffer, facts: Facts, decoders: tuple[str, ...], max_pixels: int | None = None
) -> Iterator[InputContainer]:
    """The file, open for reading; only `decoders` (FFmpeg's names) may be used to look into its streams."""
    options = {"codec_whitelist": ",".join(decoders), "max_streams": str(MOST_STREAMS)}
    if max_pixels is not None:
        options["max_pixels"] = str(max_pixels)
    with av.open(
        io.BytesIO(data),
        mode="r",
        format=DEMUXERS[facts.format],
        options=options,
        metadata_errors="replace",
        io_open=_open_nothing,
    ) as container:
        yield container


def _open_nothing(*_: object) -> NoReturn:
    raise PermissionError("a media file may name no other files")


def only(container: InputContainer, stream: Stream) -> None:
    """Have the demuxer skip all other streams."""
    for other in container.streams:
        if other is not stream:
            other.discard = Discard.all


def check_decoder(stream: Stream, decoders: tuple[str, ...], what: str) -> None:
    """Raises `EncoderError` MEDIA_UNSUPPORTED unless the stream's decoder is one of `decoders`."""
    codec = stream.codec_context.name if stream.codec_context is not None else None
    if codec not in decoders:
        said = f"is coded as {codec}" if codec else "is in an unknown or missing code"
        raise EncoderError(
            ErrorCode.MEDIA_UNSUPPORTED,
            f"the {what} {said}, which is not decoded here; these are: {', '.join(available(decoders))}",
        )


def available(decoders: tuple[str, ...]) -> tuple[str, ...]:
    """The codes that those of `decoders` read which this build has."""
    found = []
    for name in decoders:
        with contextlib.suppress(av.FFmpegError, ValueError):
            found.append(av.codec.Codec(name, "r").canonical_name)
    return tuple(found)
