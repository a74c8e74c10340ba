"""The chosen frames of a film, decoded by PyAV.

The file is read twice: once for the times of its frames, of which only the first is decoded, and once to decode what
leads to the chosen ones. What lies between is read and thrown away, which costs next to nothing and, other than
seeking, comes to the same packets whatever the file's own index says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.av_container import OWN_BYTES, check_decoder, memory_bound, only, opened, reported
from spmd_encoder.media.base import Buffer, Film, FilmInfo, FilmLimits
from spmd_encoder.media.facts import Facts
from spmd_encoder.media.film_limits import (
    check_bytes,
    check_chosen,
    check_pixels,
    check_walked,
    film_too_long,
    too_many_packets,
)
from spmd_encoder.media.rgb import to_rgb, turn_of
from spmd_encoder.media.timeline import Packets, Run, Timeline

Picture = npt.NDArray[np.uint8]

DECODERS = ("h264", "hevc", "vp8", "vp9", "libdav1d")
"""FFmpeg's names of what is decoded; libdav1d reads AV1."""
MOST_PACKETS = 2_000_000
"""Two hours at 240 frames per second; some seconds to read."""
_BYTES_PER_PIXEL = 64
"""Most that a decoder holds for each pixel of a frame: twenty frames of 10 bits."""
_SPARE_PIXELS = 2**20
"""By which a coded frame, a whole number of blocks, may be larger than the shown one."""
_VP8_SHOWN = 0x10


def decode(data: Buffer, facts: Facts, choose: Callable[[FilmInfo], Sequence[int]], limits: FilmLimits) -> Film:
    """See `media.video.decode`."""
    pixels = min(limits.max_pixels, facts.width * facts.height or limits.max_pixels)
    room = OWN_BYTES + 2 * len(data) + _BYTES_PER_PIXEL * pixels
    with memory_bound(room), reported("film"):
        timeline, first = _survey(data, facts, limits)
        reader = _Reader(data, facts, limits, first)
    width, height = reader.turn.size(first.width, first.height)
    info = FilmInfo(
        num_frames=timeline.num_frames, fps=timeline.fps, seconds=timeline.seconds, width=width, height=height
    )
    indices = [int(index) for index in choose(info)]
    check_chosen(indices, info, limits)
    packets = [timeline.shown_at(index) for index in indices]
    check_bytes(len(set(packets)), info, limits)
    with memory_bound(room + limits.max_bytes), reported("film"):
        pictures = reader.pictures(timeline.runs(packets), set(packets))
    kept = [(index, packet) for index, packet in zip(indices, packets, strict=True) if packet in pictures]
    if not kept:
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "none of the frames that were chosen can be decoded")
    return Film(
        frames=tuple(pictures[packet] for _, packet in kept),
        times=tuple(timeline.time_of(packet) for _, packet in kept),
        indices=tuple(index for index, _ in kept),
        info=info,
    )


def _survey(data: Buffer, facts: Facts, limits: FilmLimits) -> tuple[Timeline, VideoFrame]:
    """When each frame is shown, by the packets that are there, and the first frame that can be decoded."""
    packets, first, walked = Packets(), None, 0
    with _track(data, facts, limits) as (container, stream):
        unit, rate = stream.time_base, stream.average_rate
        if unit is None:
            raise ValueError("no unit of time")
        longest = limits.max_seconds / float(unit)
        is_vp8 = stream.codec_context.name == "vp8"
        for packet in _packets(container, stream):
            packets.add(_time(packet, packets), is_key=packet.is_keyframe, is_shown=_is_shown(packet, is_vp8=is_vp8))
            if packets.span > longest:
                raise film_too_long(limits)
            if len(packets) > MOST_PACKETS:
                raise too_many_packets(MOST_PACKETS)
            if first is None:
                walked += 1
                check_walked(walked, limits)
                first = next(_sound_frames(stream, packet), None)
        first = first or next(_sound_frames(stream, None), None)
    if first is None or not any(packets.shown):
        raise EncoderError(ErrorCode.MEDIA_CORRUPT, "no frame of the film can be decoded")
    check_pixels(first.width, first.height, limits.max_pixels)
    return Timeline(packets, unit, rate), first


class _Reader:
    """Decodes runs of packets. All frames come as large as `first`, and turned as it is."""

    def __init__(self, data: Buffer, facts: Facts, limits: FilmLimits, first: VideoFrame) -> None:
        self._data, self._facts, self._limits = data, facts, limits
        self._size = first.width, first.height
        self.turn = turn_of(first)

    def pictures(self, runs: Sequence[Run], wanted: set[int]) -> dict[int, Picture]:
        """By packet; what cannot be decoded is left out."""
        check_walked(sum(run.stop - run.start for run in runs), self._limits)
        found: dict[int, Picture] = {}
        waiting = iter(runs)
        run = next(waiting)
        with _track(self._data, self._facts, self._limits) as (container, stream):
            for position, packet in enumerate(_packets(container, stream)):
                if position >= run.stop:
                    self._keep(stream, None, wanted, found)
                    if (following := next(waiting, None)) is None:
                        return found
                    stream.codec_context.flush_buffers()
                    run = following
                if position >= run.start:
                    packet.pts = position  # comes back with the frame, and says which packet it was
                    self._keep(stream, packet, wanted, found)
            self._keep(stream, None, wanted, found)
        return found

    def _keep(
        self, stream: VideoStream, packet: Packet[VideoStream] | None, wanted: set[int], found: dict[int, Picture]
    ) -> None:
        for frame in _sound_frames(stream, packet):
            if frame.pts in wanted:
                check_pixels(frame.width, frame.height, self._limits.max_pixels)
                found[frame.pts] = to_rgb(frame, *self._size, self.turn)


@contextlib.contextmanager
def _track(data: Buffer, facts: Facts, limits: FilmLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The file and its track of pictures, the default one, ready to be decoded."""
    max_pixels = 2 * limits.max_pixels + _SPARE_PIXELS
    with opened(data, facts, DECODERS, max_pixels) as container:
        covers = Disposition.attached_pic | Disposition.timed_thumbnails
        tracks = [stream for stream in container.streams.video if not stream.disposition & covers]
        if not tracks:
            raise EncoderError(ErrorCode.MEDIA_UNSUPPORTED, "the item has no track of moving pictures")
        stream = next((each for each in tracks if each.disposition & Disposition.default), tracks[0])
        check_decoder(stream, DECODERS, "film")
        only(container, stream)
        context = stream.codec_context
        check_pixels(context.width, context.height, limits.max_pixels)
        context.thread_count = 1
        context.options = {"max_pixels": str(max_pixels)}
        yield container, stream


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Those that hold something; the same ones whenever the file is read."""
    for packet in container.demux(stream):
        if packet.size:
            yield packet


def _time(packet: Packet[VideoStream], before: Packets) -> int:
    if (time := packet.pts if packet.pts is not None else packet.dts) is not None:
        return time
    return before.times[-1] + max(1, packet.duration or 0) if before.times else 0


def _is_shown(packet: Packet[VideoStream], *, is_vp8: bool) -> bool:
    """Not what an edit list cuts away, nor a picture of VP8 that others only refer to."""
    if packet.is_discard:
        return False
    return not is_vp8 or bool(memoryview(packet)[0] & _VP8_SHOWN)


def _sound_frames(stream: VideoStream, packet: Packet[VideoStream] | None) -> Iterator[VideoFrame]:
    """What the decoder gives for a packet, or in the end: nothing for what it cannot decode, or only in part."""
    try:
        frames = stream.codec_context.decode(packet)
    except MemoryError:
        raise
    except av.FFmpegError:
        return
    yield from (frame for frame in frames if not frame.is_corrupt)
