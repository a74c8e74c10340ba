"""How often a JPEG paints over its whole picture: read from its markers, before anything is decoded."""

from __future__ import annotations

import re

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Buffer

MOST_SCANS = 100
"""A scan of 34 bytes costs a pass over all pixels. Encoders write about ten; libtiff has this limit too."""
MOST_SEGMENTS = 10_000
"""Far more than any metadata take: one segment holds up to 64 KiB of them."""

# What libjpeg takes for a marker: not a stuffed byte, not a fill byte, not a restart inside a scan.
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = 0xD9
_FIRST_WITH_LENGTH = 0xC0
_START_OF_IMAGE = 0xD8


def check_scans(data: Buffer) -> None:
    """Raises `EncoderError` MEDIA_CORRUPT for a JPEG with too many scans, or too many segments around them.

    Markers inside segments (a thumbnail's) and behind the picture's end (a second picture, a film) do not count.
    """
    scans = position = 0
    for _ in range(MOST_SEGMENTS):
        marker = _MARKER.search(data, position)
        if marker is None:
            return
        code, position = data[marker.start(1)], marker.end()
        if code == _END_OF_IMAGE:
            return
        if code == _START_OF_SCAN:
            scans += 1
            if scans > MOST_SCANS:
                raise EncoderError(
                    ErrorCode.MEDIA_CORRUPT,
                    f"the JPEG picture has more than {MOST_SCANS} scans, each of which would paint over all of it; "
                    "save it anew",
                )
        if code >= _FIRST_WITH_LENGTH and code != _START_OF_IMAGE:
            position += max(2, int.from_bytes(data[position : position + 2], "big"))
    raise EncoderError(
        ErrorCode.MEDIA_CORRUPT, f"the JPEG picture has more than {MOST_SEGMENTS} segments; save it anew"
    )
