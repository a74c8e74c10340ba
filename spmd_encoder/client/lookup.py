"""What the server's caches hold, by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from spmd_encoder.client.errors import BadReplyError
from spmd_encoder.client.media import Reading
from spmd_encoder.client.reply import Reply, json_of
from spmd_encoder.client.sources import Source

# Of one request; the server's limit.
MAX_DIGESTS = 10_000


@dataclass(frozen=True, kw_only=True)
class Held:
    """Whether one picture's result is held, and by which replicas; `shape`, `dtype`, `num_tokens` and `grid` as
    `Result` has them, empty where it is not held."""

    index: int
    name: str
    digest: str
    held: bool
    replicas: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_tokens: int = 0
    grid: tuple[int, int, int] | None = None


class _Entry(msgspec.Struct, frozen=True):
    digest: str
    held: bool
    replicas: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    num_tokens: int | None = None
    grid: tuple[int, int, int] | None = None


def digest_of(source: Source) -> str:
    """Reads the file where the source is one. Raises `ItemError`; ValueError for a URL, whose content is not known."""
    if source.digest is not None:
        return source.digest
    if source.url is not None:
        raise ValueError(f"{source.name} is a URL, which the server would have to fetch; look up its digest")
    return "sha256:" + hashlib.sha256(source.load()).hexdigest()


def lookups(sources: Sequence[Source]) -> list[Sequence[Source]]:
    """Those that one request may ask for: read alike, and not too many."""
    alike: dict[Reading, list[Source]] = {}
    for source in sources:
        alike.setdefault(source.reading, []).append(source)
    return [
        group[start : start + MAX_DIGESTS] for group in alike.values() for start in range(0, len(group), MAX_DIGESTS)
    ]


def lookup_body(digests: Sequence[str], reading: Reading, options: Mapping[str, object]) -> bytes:
    of = {} if reading.modality is None else {"modality": reading.modality}
    return msgspec.json.encode({"digests": digests, **of, **reading.options, **options})


def held_of(reply: Reply, sources: Sequence[Source], digests: Sequence[str]) -> list[Held]:
    """Raises `RefusedError`, or `BadReplyError` for nonsense."""
    try:
        entries = msgspec.convert(json_of(reply).get("data"), list[_Entry])
    except msgspec.ValidationError as error:
        raise BadReplyError(f"the reply is no look-up's: {str(error)[:200]}") from None
    if [entry.digest for entry in entries] != list(digests):
        raise BadReplyError("the server answered other digests than were asked for")
    return [
        Held(
            index=source.index,
            name=source.name,
            digest=entry.digest,
            held=entry.held,
            replicas=entry.replicas,
            shape=entry.shape or (),
            dtype=entry.dtype or "",
            num_tokens=entry.num_tokens or 0,
            grid=entry.grid,
        )
        for source, entry in zip(sources, entries, strict=True)
    ]
