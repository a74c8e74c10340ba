"""What is told of a sound or film before it is decoded."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """From the headers alone; 0 where they do not tell. `width` and `height` (pixels) are upright.

    `complete` is False where the file is shorter than its own sizes say. `samples`, per channel, is a promise of the
    header that the decoded sound must keep.
    """

    format: str = ""
    seconds: float = 0.0
    width: int = 0
    height: int = 0
    complete: bool = True
    samples: int = 0
