"""Which pictures share a request: pure, fed one by one, so that it serves lists and streams alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from spmd_encoder.client.sources import MediaLike, Source, source_of


@dataclass(frozen=True)
class ChunkLimits:
    """Most pictures, and most bytes of pictures, in one request. A larger picture goes alone."""

    items: int = 8
    num_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.items < 1 or self.num_bytes < 1:
            raise ValueError("a request takes at least one picture and one byte")


@dataclass
class Chunker:
    """Puts neighbours together, in order. A request holds either URLs and digests (JSON) or files (raw bytes)."""

    limits: ChunkLimits
    _chunk: list[Source] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, source: Source) -> list[Source]:
        """The chunk that is complete because `source` begins the next one, else an empty list."""
        fits = (
            len(self._chunk) < self.limits.items
            and self._num_bytes + source.size_bytes <= self.limits.num_bytes
            and (not self._chunk or self._chunk[0].group == source.group)
        )
        done = [] if fits else self.flush()
        self._chunk.append(source)
        self._num_bytes += source.size_bytes
        return done

    def flush(self) -> list[Source]:
        """What is left, at the end."""
        done, self._chunk, self._num_bytes = self._chunk, [], 0
        return done


def chunked(images: Iterable[MediaLike], limits: ChunkLimits) -> Iterator[list[Source]]:
    """Chunks of an iterable, which is read no further than to the picture after a chunk's last."""
    chunker = Chunker(limits)
    for index, image in enumerate(images):
        if done := chunker.add(source_of(image, index)):
            yield done
    if done := chunker.flush():
        yield done
