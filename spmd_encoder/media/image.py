"""Pictures: what their header says, and their pixels as upright RGB.

Only what the content shows is believed, never a declared type, and only the formats listed here are opened: Pillow
knows some forty, several of which start programs or are rarely tested.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import warnings
from types import MappingProxyType

# Pillow opens a listed format only if its plugin is loaded already.
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Buffer, Header
from spmd_encoder.media.header import HeaderError, HeaderTooLongError, check_avif, read_size
from spmd_encoder.media.jpeg import check_scans
from spmd_encoder.media.memory import is_out_of_memory, out_of_memory
from spmd_encoder.media.pixels import Background, bare, normalise_transparency, orientation, to_rgb, upright

log = logging.getLogger(__name__)

HAS_AVIF = bool(features.check("avif"))
_PLUGINS = (
    *(BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin),
    *((importlib.import_module("PIL.AvifImagePlugin"),) if HAS_AVIF else ()),
)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF") + (("AVIF",) if HAS_AVIF else ())
"""Pillow's names of what is decoded. A multi-picture JPEG (MPO) comes as JPEG and is read to its first picture."""

_PREFIXES = MappingProxyType(
    {
        "JPEG": (b"\xff\xd8\xff",),
        "PNG": (b"\x89PNG\r\n\x1a\n",),
        "GIF": (b"GIF87a", b"GIF89a"),
        "BMP": (b"BM",),
        "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    }
)
_HEAD_BYTES = 32
_TILE_SIZE = (322, 323)
# Pillow's names of its own limits, in its words on a file that goes beyond them.
_TOO_MUCH_TEXT = re.compile("MAX_TEXT_(CHUNK|MEMORY)")


def set_pixel_limit(max_pixels: int) -> None:
    """Let Pillow's own limit, which holds for the whole process, follow ours; for a process's start.

    Pillow warns above its limit and refuses twice as much. What is between is refused here, so the warning says
    nothing new.
    """
    Image.MAX_IMAGE_PIXELS = max_pixels
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def probe(data: Buffer, max_pixels: int | None = None) -> Header:
    """Read format, width and height from the header; no pixel is decoded.

    Raises `EncoderError`: MEDIA_UNSUPPORTED, MEDIA_CORRUPT, or TOO_LARGE above `max_pixels` (width times height).
    """
    name = _claimed(data)
    try:
        if name == "AVIF":
            check_avif(bytes(data))
            with _open(data, max_pixels) as image:
                return Header(name, image.width, image.height)
        size = read_size(name, bytes(data))
    except HeaderTooLongError:
        raise EncoderError(
            ErrorCode.MEDIA_CORRUPT, f"the header of the {name} picture is longer than that of any real one"
        ) from None
    except HeaderError as error:
        raise _undecodable(name, error) from None
    _check_size(*size, max_pixels)
    return Header(name, *size)


def decode(data: Buffer, max_pixels: int | None = None, background: Background = "white") -> Image.Image:
    """The whole picture as 8-bit RGB: upright, transparency on `background`, the first frame of an animation.

    Colour profiles are not applied. Raises as `probe`; a file that ends early is MEDIA_CORRUPT.
    """
    picture, turn = _load(data, max_pixels)
    try:
        rgb = to_rgb(picture, background)
        del picture  # or turning would make a third copy
        return upright(rgb, turn)
    except EncoderError:
        raise
    except Exception as error:
        raise _undecodable(sniff(data) or "", error) from None


def _load(data: Buffer, max_pixels: int | None) -> tuple[Image.Image, int]:
    """The pixels as they are stored, and their EXIF orientation."""
    with _open(data, max_pixels) as image:
        try:
            if image.format in ("JPEG", "MPO"):
                check_scans(data)
            elif isinstance(image, TiffImagePlugin.TiffImageFile):
                _check_tile(image, max_pixels)
            normalise_transparency(image)  # before `load`, which forgets how samples are stored
            image.load()
            return bare(image), orientation(image)
        except EncoderError:
            raise
        except Exception as error:
            raise _undecodable(image.format or "", error) from None


def sniff(data: Buffer) -> str | None:
    """The allowed format that `data` claims to be, or that it may have been before it was cut short."""
    head = bytes(data[:_HEAD_BYTES])
    for name, prefixes in _PREFIXES.items():
        if any(head.startswith(prefix) or (head and prefix.startswith(head)) for prefix in prefixes):
            return name
    if head[:4] == b"RIFF" and head[8:12] in (b"WEBP", b""):
        return "WEBP"
    if HAS_AVIF and head[4:8] == b"ftyp" and (b"avif" in head[8:] or b"avis" in head[8:]):
        return "AVIF"
    return None


def _claimed(data: Buffer) -> str:
    """`sniff`, but raises `EncoderError` MEDIA_CORRUPT or MEDIA_UNSUPPORTED where it is none."""
    if not data:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "the picture has no bytes")
    claimed = sniff(data)
    if claimed is None:
        raise EncoderError(
            ErrorCode.MEDIA_UNSUPPORTED,
            f"{_foreign_kind(data)}; the formats decoded here are {', '.join(FORMATS)}",
        )
    return claimed


def _open(data: Buffer, max_pixels: int | None) -> Image.Image:
    claimed = _claimed(data)
    try:
        image = Image.open(io.BytesIO(data), formats=(claimed,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = Image.MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
        raise EncoderError(
            ErrorCode.TOO_LARGE, f"the picture has more pixels than the limit of {limit} (--max-image-pixels)"
        ) from None
    except Exception as error:
        raise _undecodable(claimed, error) from None
    try:
        _check_size(image.width, image.height, max_pixels)
    except EncoderError:
        image.close()
        raise
    return image


def _check_size(width: int, height: int, max_pixels: int | None) -> None:
    if width < 1 or height < 1:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, f"the picture's header says {width} x {height} pixels")
    if max_pixels is not None and width * height > max_pixels:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the picture has {width} x {height} = {width * height} pixels, more than the limit of {max_pixels} "
            "(--max-image-pixels)",
        )


def _check_tile(image: TiffImagePlugin.TiffImageFile, max_pixels: int | None) -> None:
    """A tile is decoded as a whole, however little of it the picture shows."""
    width, height = (image.tag_v2.get(tag, 0) for tag in _TILE_SIZE)
    if not isinstance(width, int) or not isinstance(height, int):
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "the TIFF picture says no single size of its tiles")
    if max_pixels is not None and width * height > max_pixels:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the picture's tiles have {width} x {height} = {width * height} pixels, more than the limit of "
            f"{max_pixels} (--max-image-pixels)",
        )


def _undecodable(name: str, error: Exception) -> EncoderError:
    """Whatever Pillow raises on a damaged file (OSError, SyntaxError, struct.error, ...), without its words.

    Those may quote the file's bytes.
    """
    log.debug("a %s picture failed with %s", name, type(error).__name__)
    if is_out_of_memory(error):
        return out_of_memory()
    if name == "PNG" and isinstance(error, ValueError) and _TOO_MUCH_TEXT.search(str(error)):
        return EncoderError(
            ErrorCode.TOO_LARGE,
            "the PNG picture holds more text, or a larger colour profile, than is read here: at most "
            f"{PngImagePlugin.MAX_TEXT_CHUNK >> 20} MiB in one chunk and {PngImagePlugin.MAX_TEXT_MEMORY >> 20} MiB in "
            "all; save it without them",
        )
    return EncoderError(
        ErrorCode.MEDIA_CORRUPT, f"the {name} picture cannot be decoded: it is damaged or ends before its end"
    )


_FOREIGN_PREFIXES = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xffO\xffQ", "a JPEG 2000 picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (b"\0\0\1\0", "an icon"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM film"),
)


def _foreign_kind(data: Buffer) -> str:
    """What a file of no allowed format seems to be, for the error message."""
    head = bytes(data[:256])
    for prefix, name in _FOREIGN_PREFIXES:
        if head.startswith(prefix):
            return f"the item is {name}"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in (b"heic", b"heix", b"hevc", b"mif1", b"msf1"):
            return "the item is a HEIF picture"
        return "the item is an AVIF picture" if brand in (b"avif", b"avis") else "the item is an MP4 or similar film"
    text = head.lstrip().lower()
    if text.startswith((b"<?xml", b"<svg")) or b"<svg" in text:
        return "the item is an SVG or XML document"
    if text.startswith((b"<!doctype", b"<html")):
        return "the item is an HTML document"
    return "the item is not a picture of a known format"
