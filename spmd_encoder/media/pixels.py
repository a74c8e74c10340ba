"""From any mode that Pillow decodes to, to upright 8-bit RGB.

A picture of 100 megapixels is 400 MB in most of Pillow's modes, so there is never a third whole copy beside the decoded
one and the RGB one: what needs one goes tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from spmd_encoder.errors import EncoderError, ErrorCode

Background = Literal["white", "black", "drop"]
_LEVELS = MappingProxyType({"white": 255, "black": 0})
_EXIF_ORIENTATION = 0x0112
_TILE_PIXELS = 2**16
_TURNS = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
# The file's samples of these PNG kinds are scaled to 8 bits while loading, its transparent value is not.
_GREY_SCALE = MappingProxyType({"L;2": 85, "L;4": 17})


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8. Damaged EXIF counts as none: it says nothing about the pixels."""
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and value in _TURNS else 1


def upright(image: Image.Image, turn: int) -> Image.Image:
    """`image` as a viewer that honours orientation `turn` shows it."""
    return image.transpose(_TURNS[turn]) if turn in _TURNS else image


def normalise_transparency(image: Image.Image) -> None:
    """Bring a PNG's transparent value to the 8-bit scale of the pixels that `load` will give.

    Must run before `load`, which forgets how the samples are stored in the file.
    """
    value = image.info.get("transparency")
    tiles = getattr(image, "tile", None)
    if value is None or image.format != "PNG" or not tiles:
        return
    raw_mode = tiles[0][3]
    if isinstance(value, int) and raw_mode in _GREY_SCALE:
        image.info["transparency"] = value * _GREY_SCALE[raw_mode]
    elif isinstance(value, tuple) and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(sample >> 8 for sample in value)


def bare(image: Image.Image) -> Image.Image:
    """The pixels of a loaded picture without what its decoder keeps beside them: WebP's and AVIF's are larger.

    Nothing is copied. `image` must be let go then.
    """
    return image._new(image.im)


def to_rgb(image: Image.Image, background: Background = "white") -> Image.Image:
    """Any loaded picture as RGB, transparent parts on `background`, deep samples scaled (not clipped) to 8 bits.

    `drop` leaves out the alpha channel instead: what is transparent shows the colour that was stored under it, as
    Pillow's own `convert("RGB")`, and servers that call it, have it. An RGB picture may be given back as it is.
    """
    if image.mode.startswith("I;16"):
        return _by_tiles(image, lambda tile: _from_16_bits(tile, background))
    if image.mode in ("I", "F"):
        low, top = _scale(image)
        return _by_tiles(image, lambda tile: _scaled(tile, low, top))
    if image.mode == "LAB":
        return _from_lab(image)
    if image.has_transparency_data and background != "drop":
        return _by_tiles(image, lambda tile: _on(background, tile))
    return image if image.mode == "RGB" else image.convert("RGB")


def _by_tiles(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    out = Image.new("RGB", image.size)
    for tile, corner in _tiles(image):
        out.paste(convert(tile), corner)
    return out


def _tiles(image: Image.Image) -> Iterator[tuple[Image.Image, tuple[int, int]]]:
    """The whole picture in copies of at most `_TILE_PIXELS`, each with its upper left corner."""
    width = min(image.width, _TILE_PIXELS)
    height = _TILE_PIXELS // width
    for top in range(0, image.height, height):
        for left in range(0, image.width, width):
            box = (left, top, min(left + width, image.width), min(top + height, image.height))
            yield image.crop(box), (left, top)


def _on(background: Background, tile: Image.Image) -> Image.Image:
    level = _LEVELS[background]
    ground = Image.new("RGBA", tile.size, (level, level, level, 255))
    ground.alpha_composite(tile.convert("RGBA"))
    return ground.convert("RGB")


def _from_16_bits(tile: Image.Image, background: Background) -> Image.Image:
    samples = np.asarray(tile).astype(np.uint32)
    grey = ((samples * 255 + 32767) // 65535).astype(np.uint8)
    transparent = tile.info.get("transparency")
    if isinstance(transparent, int) and background != "drop":
        grey[samples == transparent] = _LEVELS[background]
    return Image.fromarray(grey).convert("RGB")


def _scale(image: Image.Image) -> tuple[float, float]:
    """What is taken from 32-bit samples, which no file format gives a fixed range, and what is white then.

    Taken as what is customary where the values fit: integers as 16-bit, floats as 0..1, else as 0..255. What fits
    neither is stretched from its least to its greatest value. NaN is black.
    """
    ranges = [(float(samples.min()), float(samples.max())) for samples in (_samples(tile) for tile, _ in _tiles(image))]
    low, high = min(least for least, _ in ranges), max(most for _, most in ranges)
    customary = (65535.0,) if image.mode == "I" else (1.0, 255.0)
    for top in customary:
        if low >= 0 and high <= top:
            return 0.0, top
    return low, max(high - low, 1e-30)


def _scaled(tile: Image.Image, low: float, top: float) -> Image.Image:
    grey = np.asarray(np.rint((_samples(tile) - low) * (255.0 / top)), dtype=np.uint8)
    return Image.fromarray(grey).convert("RGB")


def _samples(tile: Image.Image) -> NDArray[np.float64]:
    samples = np.asarray(tile).astype(np.float64)
    bound = float(np.finfo(np.float32).max)
    return np.clip(np.where(np.isnan(samples), 0.0, samples), -bound, bound)


def _from_lab(image: Image.Image) -> Image.Image:
    try:
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    except ImportError:
        raise EncoderError(
            ErrorCode.MEDIA_UNSUPPORTED, "LAB pictures need a Pillow with LittleCMS, which this server does not have"
        ) from None
    assert converted is not None  # only an in-place conversion returns nothing
    return converted
