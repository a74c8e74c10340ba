"""Items that are named by the digest of what was sent before."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spmd_encoder.api.types import NO_OPTIONS, ItemOptions, MediaItem, Modality
from spmd_encoder.errors import EncoderError, ErrorCode

DIGEST_PATTERN = "^sha256:[0-9a-f]{64}$"
MAX_DIGESTS = 10_000
"""Most in one look-up."""

_DIGEST = re.compile(DIGEST_PATTERN)


def held_item(modality: Modality, digest: str, options: ItemOptions = NO_OPTIONS) -> MediaItem:
    """Raises `EncoderError` INVALID_REQUEST where it is no digest."""
    if not _DIGEST.fullmatch(digest):
        raise EncoderError(ErrorCode.INVALID_REQUEST, "a digest is sha256: and 64 lower-case hexadecimal digits")
    return MediaItem(modality=modality, data=b"", digest=digest, options=options, held=True)


def lookup_keys(digests: Sequence[str], modality: Modality, options: ItemOptions = NO_OPTIONS) -> list[str]:
    """What a look-up asks the service for. Raises `EncoderError` INVALID_REQUEST, said of `digests`."""
    if not 1 <= len(digests) <= MAX_DIGESTS:
        raise EncoderError(ErrorCode.INVALID_REQUEST, f"a look-up is of 1 to {MAX_DIGESTS} digests", param="digests")
    keys = []
    for index, digest in enumerate(digests):
        try:
            keys.append(held_item(modality, digest, options).key)
        except EncoderError as error:
            raise error.at(f"digests[{index}]") from None
    return keys
