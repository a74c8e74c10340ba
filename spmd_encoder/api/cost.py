"""An item's price in encoder tokens, from what its file's header says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmd_encoder.api.resizing import whole_squares
from spmd_encoder.api.tiling import Tiling
from spmd_encoder.api.types import ItemOptions, MediaItem, Modality


@dataclass(frozen=True, kw_only=True)
class AudioCost:
    """`tokens_per_s` of sound, for `min_s` at least and `max_s` at most; a family that pads has both equal, one that
    cuts into windows and pads the last has the length of a window as `step_s`."""

    tokens_per_s: float
    min_s: float = 0.0
    max_s: float = 30.0
    step_s: float = 0.0

    def tokens(self, seconds: float) -> int:
        """At least 1; of an unknown length (0) the most."""
        counted = min(max(seconds or self.max_s, self.min_s), self.max_s)
        if self.step_s:
            counted = math.ceil(counted / self.step_s) * self.step_s
        return max(1, math.ceil(self.tokens_per_s * counted))


@dataclass(frozen=True, kw_only=True)
class VideoCost:
    """`fps` frames of each second, `min_frames` to `max_frames`, of which `frames_per_step` are encoded together.

    Films longer than the first of `slower` take the rate that is its second, unless a request has one of its own. With
    an `fps` of 0 the number of frames does not depend on the length.

    Each step costs `tokens_per_step`, or, where that is None, what a picture of its size does, within `min_pixels` and
    `max_pixels` of a frame, and `min_pixels_in_all` and `max_pixels_in_all` of the film (0: no such bound).
    `raises_short_sides` is as in `CostTable`.
    """

    fps: float
    min_frames: int
    max_frames: int
    frames_per_step: int = 1
    tokens_per_step: int | None = None
    min_pixels: int = 0
    max_pixels: int = 0
    min_pixels_in_all: int = 0
    max_pixels_in_all: int = 0
    raises_short_sides: bool = False
    slower: tuple[tuple[float, float], ...] = ()

    def frames(self, seconds: float, options: ItemOptions) -> int:
        """How many are encoded; of an unknown length (0) the most."""
        most = min(self.max_frames, options.max_frames or self.max_frames)
        fps = options.fps or next((rate for longer, rate in reversed(self.slower) if seconds > longer), self.fps)
        wanted = math.ceil(seconds * fps) if seconds else most
        least = 1 if options.fps and not self.fps else self.min_frames
        return max(1, min(max(wanted, least), most))


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """How a family turns a picture's size into encoder tokens; data, so that it can travel in `Hello`.

    `max_side` bounds the longer side before all else, as Pixtral's processor does, which then rounds sides up.
    `fixed_tokens` is set for towers with one input size; with `tiling` it is the price of one tile, if tiles have one
    size. Otherwise a picture is resized to a multiple of `patch * merge` per side, as `api.resizing.whole_squares`
    says, and costs what it then has of patches.
    """

    patch: int = 14
    merge: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    max_side: int = 0
    raises_short_sides: bool = False
    fixed_tokens: int | None = None
    tiling: Tiling | None = None
    audio: AudioCost | None = None
    video: VideoCost | None = None

    def tokens(self, item: MediaItem) -> int:
        """The item's price; 1 where the family does not take its modality, and where there is nothing to encode."""
        if item.held:
            return 1
        match item.modality:
            case Modality.IMAGE:
                return self.image_tokens(item.width, item.height)
            case Modality.AUDIO:
                return 1 if self.audio is None else self.audio.tokens(item.seconds)
            case Modality.VIDEO:
                return 1 if self.video is None else self._video_tokens(self.video, item)

    def _video_tokens(self, video: VideoCost, item: MediaItem) -> int:
        frames = item.frames or video.frames(item.seconds, item.options)
        steps = math.ceil(frames / video.frames_per_step)
        if video.tokens_per_step is not None:
            return steps * video.tokens_per_step
        # However many frames there are, each may have a little more than the least (`cap_pixels_per_frame`).
        floor = int(1.05 * (video.min_pixels or video.min_pixels_in_all))
        each, in_all = video.max_pixels, video.max_pixels_in_all
        if each and in_all:
            each = max(min(each, in_all // frames), floor)
        if video.min_pixels_in_all:
            bounds, count = (video.min_pixels_in_all, each * frames or in_all), max(frames, video.frames_per_step)
        else:
            bounds, count = (video.min_pixels, each or in_all // frames), 1
        return steps * self._patches(item.width, item.height, *bounds, count, video)

    def image_tokens(self, width: int, height: int) -> int:
        """Patches that the tower computes for one picture (before any merging); at least 1."""
        width, height = max(1, width), max(1, height)
        if self.tiling is not None and self.tiling.unit:
            return self.tiling.squares(width, height) * (self.tiling.unit // self.patch) ** 2
        if self.fixed_tokens is not None:
            return self.fixed_tokens * (1 if self.tiling is None else self.tiling.tiles(width, height))
        if self.max_side:
            unit = self.patch * self.merge
            scale = min(1.0, self.max_side / max(width, height))
            return math.ceil(width * scale / unit) * math.ceil(height * scale / unit) * self.merge**2
        return self._patches(width, height, self.min_pixels, self.max_pixels)

    def _patches(
        self, width: int, height: int, least: int, most: int, frames: int = 1, video: VideoCost | None = None
    ) -> int:
        """Of one picture, or of one of so many frames of a film."""
        squares = whole_squares(
            *(max(1, width), max(1, height), self.patch * self.merge, least, most),
            frames=frames,
            step=1 if frames == 1 or video is None else video.frames_per_step,
            raises_short_sides=(video or self).raises_short_sides,
        )
        return squares * self.merge**2
