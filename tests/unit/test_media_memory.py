"""How much memory a decode takes beside the file: measured, as bytes per pixel, each in a process of its own."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmd_encoder.errors import ErrorCode
from spmd_encoder.media import pixels
from spmd_encoder.media.image import decode
from spmd_encoder.media.pixels import to_rgb
from tests.unit.test_media_image import refused, save

SIDE = 3000

SCRIPT = """
import sys
from pathlib import Path
from spmd_encoder.media.image import decode

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

small, large = (Path(path).read_bytes() for path in sys.argv[1:])
decode(small)  # what a first decode loads
before = kib("VmRSS")
image = decode(large)
print((kib("VmHWM") - before) * 1024 / (image.width * image.height))
"""


def picture(kind: str, side: int) -> bytes:
    grey = np.add.outer(np.arange(side), np.arange(side)) % 251
    eight = Image.fromarray(grey.astype(np.uint8))
    rgba = Image.merge("RGBA", [eight] * 4)
    turned = Image.Exif()
    turned[0x0112] = 6
    match kind:
        case "JPEG, turned":
            return save(Image.merge("RGB", [eight] * 3), "JPEG", exif=turned)
        case "PNG of 16 bits":
            return save(Image.fromarray((grey * 257).astype(np.uint16)), compress_level=1)
        case "PNG with alpha":
            return save(rgba, compress_level=1)
        case "PNG with a transparent palette":
            return save(eight.convert("P"), compress_level=1, transparency=b"\0" * 256)
        case "TIFF of floats":
            return save(Image.fromarray(grey.astype(np.float32)), "TIFF", compression="tiff_lzw")
        case "TIFF of integers":
            return save(Image.fromarray(grey.astype(np.int32) * 300), "TIFF", compression="tiff_lzw")
        case "WebP with alpha":
            return save(rgba, "WEBP", method=0)
        case _:  # the second frame is never looked at
            return save(rgba, "WEBP", save_all=True, append_images=[eight.convert("RGBA")], method=0)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("JPEG, turned", 9),
        ("PNG of 16 bits", 7),
        ("PNG with alpha", 9),
        ("PNG with a transparent palette", 6),
        ("TIFF of floats", 9),
        ("TIFF of integers", 9),
        ("WebP with alpha", 17),
        ("WebP, animated", 17),
    ],
)
def test_bytes_per_pixel(kind: str, most: int, tmp_path: Path) -> None:
    paths = [tmp_path / "small", tmp_path / "large"]
    for path, side in zip(paths, (8, SIDE), strict=True):
        path.write_bytes(picture(kind, side))
    told = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, paths)], check=True, capture_output=True, text=True)
    assert 1 < float(told.stdout) < most


def tiled(side: int) -> bytes:
    """A grey TIFF of 16 x 16 pixels in one tile of `side` x `side`."""
    pixels = zlib.compress(bytes(side * side))
    fields = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    fields += [(324, 8 + 2 + 12 * 10 + 4), (325, len(pixels))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields)
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + pixels


def test_a_tile_that_is_larger_than_its_picture_counts() -> None:
    assert decode(tiled(64), 64 * 64).size == (16, 16)
    error = refused(lambda: decode(tiled(80), 64 * 64), ErrorCode.TOO_LARGE)
    assert "80 x 80" in error.message and "--max-image-pixels" in error.message


@pytest.mark.parametrize("mode", ["L", "P", "LA", "RGBA", "I;16", "I;16B", "I", "F", "LAB"])
def test_tiles_do_not_show(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = np.random.default_rng(3)
    width, height = 41, 23
    if mode == "F":
        image = Image.fromarray(choose.normal(size=(height, width)).astype(np.float32))
    else:
        size = len(Image.new(mode, (1, 1)).tobytes())
        image = Image.frombytes(mode, (width, height), choose.bytes(width * height * size))
    if mode == "P":
        image.putpalette(choose.bytes(768))
    if mode in ("L", "P", "I;16", "I;16B"):
        image.info["transparency"] = image.getpixel((5, 5))
    whole = to_rgb(image).tobytes()
    for pixels_per_tile in (1, 40, 41, 100):
        monkeypatch.setattr(pixels, "_TILE_PIXELS", pixels_per_tile)
        assert to_rgb(image).tobytes() == whole
