"""Where a call's embeddings go, if not into its results, and what is said of each when it is there.

docs/wire.md tells what arrives at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TypeAlias, assert_never

import msgspec


class ToFiles(msgspec.Struct, frozen=True, tag="file"):
    """A file per picture under the server's `--embedding-dir`, named by `mm_hashes`: one per picture of the call, None
    for the hex of its digest; or none at all, for the digests of all. The output is tokens."""

    mm_hashes: Sequence[str | None] | None = None


class ToReceiver(msgspec.Struct, frozen=True, tag="zmq"):
    """A message per picture to a socket that the receiver has bound (`client.receiver.EmbeddingReceiver`).

    `part` comes back in every message as `header.part.id`. A call may be several requests, and `header.index` counts
    the pictures of one: `header.digest` is what says which picture it is. A picture that cannot be read here is not
    sent, and has no message.
    """

    endpoint: str
    part: str | None = None


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """Kept by the server, for its `--send-timeout-s`, until somebody fetches it (`Client.fetch`)."""


Destination: TypeAlias = ToFiles | ToReceiver | Staged


class FileReceipt(msgspec.Struct, frozen=True, tag="file"):
    """`path` is relative to the server's `--embedding-dir`."""

    mm_hash: str
    path: str
    num_bytes: int


class PushReceipt(msgspec.Struct, frozen=True, tag="zmq"):
    endpoint: str
    num_bytes: int


class StagedReceipt(msgspec.Struct, frozen=True, tag="staged"):
    staged_id: str
    num_bytes: int


Receipt: TypeAlias = FileReceipt | PushReceipt | StagedReceipt


def check_hashes(to: Destination | None, images: object) -> None:
    """Raises ValueError where there is not one hash per picture, as far as `images` tell how many they are."""
    if not isinstance(to, ToFiles) or to.mm_hashes is None or not isinstance(images, Sized):
        return
    if len(to.mm_hashes) != len(images):
        raise ValueError(f"{len(to.mm_hashes)} mm_hashes were given for {len(images)} pictures")


def words(to: Destination, indices: Sequence[int]) -> dict[str, object]:
    """A request's `destination`, for those of the call's pictures that it has.

    Raises ValueError where `mm_hashes` has none for one of them.
    """
    match to:
        case ToFiles(mm_hashes) if mm_hashes is not None:
            if indices[-1] >= len(mm_hashes):
                raise ValueError(f"there are more pictures than the {len(mm_hashes)} mm_hashes")
            return {"type": "file", "mm_hashes": [mm_hashes[index] for index in indices]}
        case ToFiles():
            return {"type": "file"}
        case ToReceiver(endpoint, part):
            return {"type": "zmq", "endpoint": endpoint, "part": None if part is None else {"id": part}}
        case Staged():
            return {"type": "staged"}
        case _:
            assert_never(to)
