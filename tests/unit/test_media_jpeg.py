"""JPEGs whose structure alone would keep a decoder busy are refused before they are decoded."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.errors import ErrorCode
from spmd_encoder.media.image import decode
from spmd_encoder.media.jpeg import MOST_SCANS, MOST_SEGMENTS
from tests.unit.test_media_image import refused, sample, save

REFINE = b"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x00\x10" + b"\x00" * 20  # 34 bytes, over all pixels
EMPTY_SEGMENT = b"\xff\xfe\x00\x02"


def progressive(extra: bytes = b"") -> tuple[bytes, int]:
    """A progressive JPEG with `extra` before its end, and how many scans it has without."""
    data = save(sample(64, 48), "JPEG", progressive=True)
    assert data.endswith(b"\xff\xd9")
    return data[:-2] + extra + data[-2:], data.count(b"\xff\xda")


def test_scans_are_limited() -> None:
    scans = progressive()[1]
    assert 2 < scans < 20
    just, _ = progressive(REFINE * (MOST_SCANS - scans))
    assert decode(just).size == (64, 48)
    for extra in (REFINE * (MOST_SCANS - scans + 1), (b"\xff\xff\xff" + REFINE[1:]) * 300_000):
        error = refused(lambda: decode(progressive(extra)[0]), ErrorCode.MEDIA_CORRUPT)  # noqa: B023
        assert f"more than {MOST_SCANS} scans" in error.message


def test_segments_are_limited() -> None:
    assert decode(progressive(EMPTY_SEGMENT * (MOST_SEGMENTS - 100))[0]).size == (64, 48)
    error = refused(lambda: decode(progressive(EMPTY_SEGMENT * MOST_SEGMENTS)[0]), ErrorCode.MEDIA_CORRUPT)
    assert "segments" in error.message


@pytest.mark.parametrize("stray", [b"\xff\x01", b"\xff\xbf", b"\xff\xd0", b"\xff\x00", b"\xff\xfe\x00\x00"])
def test_strays_hide_no_scan(stray: bytes) -> None:
    refused(lambda: decode(progressive((stray + REFINE) * 200)[0]), ErrorCode.MEDIA_CORRUPT)


def test_what_is_no_scan_does_not_count() -> None:
    plain = save(sample(64, 48), "JPEG")
    thumbnails = b"\xff\xef" + (2 + 2 * 1000).to_bytes(2, "big") + b"\xff\xda" * 1000
    inside = plain[:2] + thumbnails + plain[2:]
    behind = plain + REFINE * 1000
    for data in (inside, behind):
        assert decode(data).tobytes() == decode(plain).tobytes()
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (1000, 1000), dtype=np.uint8))
    restarts = save(noise, "JPEG", restart_marker_blocks=1)
    assert sum(restarts.count(bytes((0xFF, code))) for code in range(0xD0, 0xD8)) > MOST_SEGMENTS
    assert decode(restarts).size == (1000, 1000)


def test_a_view_is_read_too() -> None:
    assert decode(memoryview(bytearray(progressive()[0]))).size == (64, 48)
