"""A decoded frame as upright 8-bit RGB."""

from __future__ import annotations

import struct
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame

from spmd_encoder.errors import EncoderError, ErrorCode

_RESERVED, _UNSPECIFIED = 3, 2
_MATRICES = frozenset({0, 1, _UNSPECIFIED, 4, 5, 6, 7, 9})
"""The matrix coefficients of ITU-T H.273 that libswscale turns into RGB: identity, BT.709, FCC, BT.601 (twice),
SMPTE 240M, BT.2020."""


class Turn(NamedTuple):
    """How a stored frame is shown: its axes swapped, and then mirrored along x and y."""

    swap: bool = False
    flip_x: bool = False
    flip_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        return (height, width) if self.swap else (width, height)

    def apply(self, picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """`[height, width, 3]` as it is shown."""
        if self.swap:
            picture = picture.swapaxes(0, 1)
        if self.flip_y:
            picture = picture[::-1]
        if self.flip_x:
            picture = picture[:, ::-1]
        return np.ascontiguousarray(picture)


def turn_of(frame: VideoFrame) -> Turn:
    """From the frame's display matrix (ISO/IEC 14496-12, 8.3.2), by quarters: `x' = a x + c y`, `y' = b x + d y`."""
    try:
        matrix = bytes(frame.side_data[Type.DISPLAYMATRIX])  # type: ignore[typeddict-item]
        a, b, _, c, d = struct.unpack_from("=5i", matrix)
    except (KeyError, struct.error):
        return Turn()
    if abs(b) + abs(c) > abs(a) + abs(d):
        return Turn(swap=True, flip_x=c < 0, flip_y=b < 0)
    return Turn(flip_x=a < 0, flip_y=d < 0)


def to_rgb(frame: VideoFrame, width: int, height: int, turn: Turn) -> npt.NDArray[np.uint8]:
    """`[height, width, 3]` before it is turned; a frame of another size is scaled to it (bilinear), as players do.

    Matrix and range are those that the stream says; where it says nothing BT.601 and limited, as libswscale has it, and
    with it what most models were trained on. HDR is not tone-mapped, interlaced frames stay as they are, alpha and the
    shape of pixels are ignored. Raises `EncoderError` MEDIA_UNSUPPORTED for a matrix that is not one of `_MATRICES`.
    """
    if frame.colorspace == _RESERVED:
        frame.colorspace = _UNSPECIFIED
    if frame.colorspace not in _MATRICES:
        raise EncoderError(
            ErrorCode.MEDIA_UNSUPPORTED,
            f"the film's colours are coded with matrix {frame.colorspace} of H.273, which is not read here",
        )
    picture = frame.reformat(width=width, height=height, format="rgb24", threads=1).to_ndarray()
    return turn.apply(cast("npt.NDArray[np.uint8]", picture))
