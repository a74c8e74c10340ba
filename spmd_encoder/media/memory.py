"""How much memory a preparer may take for one item: told to the kernel, which refuses what goes beyond it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable
from pathlib import Path

from spmd_encoder.api.types import Modality
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode

FIXED_BYTES = 2**30
"""For what hangs on no limit: libraries that are loaded late, tables, the features that the tower takes."""
_BYTES_PER_PIXEL = 17
_FILES = 3
"""How often an item's file may be in memory."""
_FILMS = 4
"""How often a film's chosen frames may be: decoded, stacked, resized, and as the features' values."""
_BYTES_PER_SECOND = 2 * 2**20
"""Of sound: samples in double precision, and their spectrum before it is made coarser."""
# Pillow's words on an allocation that failed in a decoder, and torch's.
_WORDS = ("decoder error -9", "out of memory", "can't allocate memory", "bad_alloc")


def default_memory_bytes(config: Config, modalities: Iterable[Modality]) -> int:
    """More than the largest item that the other limits let pass takes."""
    needs = {
        Modality.IMAGE: _BYTES_PER_PIXEL * config.server.max_image_pixels,
        Modality.AUDIO: round(_BYTES_PER_SECOND * config.media.max_audio_seconds),
        Modality.VIDEO: _FILMS * config.media.max_video_bytes_decoded,
    }
    files = _FILES * config.server.max_image_bytes
    return FIXED_BYTES + files + max((needs[modality] for modality in modalities), default=0)


def limit_memory(num_bytes: int) -> None:
    """Let this process take so many bytes more than it has now, for good; 0 is no limit. Nothing where the system does
    not tell what it has (no Linux).

    It bounds private memory that can be written, as `malloc` takes it: not mapped files, and not what a fork shares.
    """
    if not num_bytes:
        return
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        taken = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = taken + num_bytes
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused. Some decoders do not tell: their words are those for a damaged file."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError | RuntimeError) and any(words in str(error) for words in _WORDS)


def out_of_memory() -> EncoderError:
    return EncoderError(
        ErrorCode.TOO_LARGE,
        "to decode and preprocess the item takes more memory than a preparer may have (--preparer-memory-bytes)",
    )
