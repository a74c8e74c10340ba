"""What SGLang's language servers send as items: URLs, data URIs, bare base64 or paths, alone or with options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from spmd_encoder.api.types import NO_OPTIONS, ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits, ParsedItem, RemoteItem, SourceItem, check_count, parse_item
from spmd_encoder.frontends.sampling import sampling_of
from spmd_encoder.media.fetch import is_remote

_MAX_DEPTH = 8
_MAX_PATH_CHARS = 4096
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.IGNORECASE)


@dataclass(frozen=True)
class Wanted:
    """An item, and the digest that its bytes must have, as the language server knows it."""

    source: SourceItem
    digest: str | None = None


def item_name(index: int) -> str:
    return f"mm_items[{index}]"


def read_modality(text: str) -> Modality:
    """Raises `EncoderError` for one that SGLang does not know."""
    try:
        return Modality(text.lower())
    except ValueError:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST, "unsupported modality; IMAGE, VIDEO and AUDIO are known", param="modality"
        ) from None


def read_items(given: object, modality: Modality, *, max_items: int, limits: ItemLimits) -> list[Wanted]:
    """All leaves of `mm_items`, in order. Not for an event loop.

    Options are `url`, `content_hash` and, of films, `fps` and `max_frames`. Others say how to preprocess, which is the
    checkpoint's matter here as it is with SGLang for the families that are served.

    Raises `EncoderError` where there are no items or too many, or one is of no known form; an item's own fault is its
    value.
    """
    leaves = list(_leaves(given, max_items))
    check_count(len(leaves), max_items, param="mm_items")
    return [_read(leaf, modality, limits, index) for index, leaf in enumerate(leaves)]


def check_items(parsed: Sequence[ParsedItem], wanted: Sequence[Wanted]) -> None:
    """Raises the first bad item's `EncoderError`: a part is encoded as a whole or not at all."""
    for index, (item, want) in enumerate(zip(parsed, wanted, strict=True)):
        if isinstance(item, EncoderError):
            raise item
        if want.digest is not None and want.digest != item.digest:
            raise EncoderError(
                ErrorCode.INVALID_REQUEST,
                f"its content_hash is {want.digest}, but the content has {item.digest}",
                param=item_name(index),
            )


def _leaves(given: object, max_items: int, depth: int = 0) -> Iterator[object]:
    if not isinstance(given, list):
        yield given
    elif depth >= _MAX_DEPTH:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the lists are nested too deeply", param="mm_items")
    else:
        check_count(max(1, len(given)), max_items, param="mm_items")
        for entry in given:
            yield from _leaves(entry, max_items, depth + 1)


def _read(leaf: object, modality: Modality, limits: ItemLimits, index: int) -> Wanted:
    name = item_name(index)
    digest, options = None, NO_OPTIONS
    if isinstance(leaf, dict):
        digest = _content_hash(leaf.get("content_hash"), name)
        if modality is Modality.VIDEO:
            options = _sampling(leaf, name)
        leaf = leaf.get("url")
    if not isinstance(leaf, str) or not leaf:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST, "an item is a string, or an object with a string `url`", param=name
        )
    return Wanted(_source(leaf, modality, options, limits, name), digest)


def _sampling(leaf: dict[str, object], name: str) -> ItemOptions:
    try:
        return sampling_of(leaf.get("fps"), leaf.get("max_frames"))
    except EncoderError as error:
        raise error.at(name) from None


def _source(text: str, modality: Modality, options: ItemOptions, limits: ItemLimits, name: str) -> SourceItem:
    if is_remote(text) or text[:5].lower() == "data:":
        return parse_item(modality, text, limits, name, options)
    # Base64 has no full stop. That of a JPEG begins with /9j, and of an MP3 with two slashes.
    is_path = "." in text or (text.startswith("/") and not text.startswith(("/9j", "//")))
    if len(text) <= _MAX_PATH_CHARS and is_path:
        if not text.startswith("/"):
            return EncoderError(ErrorCode.INVALID_REQUEST, "a file's path must be absolute", param=name)
        return RemoteItem(modality, "file://" + quote(text, errors="surrogateescape"), options)
    return parse_item(modality, "data:;base64," + text, limits, name, options)


def _content_hash(given: object, name: str) -> str | None:
    if given is None:
        return None
    if isinstance(given, str) and _DIGEST.fullmatch(given):
        return given.lower()
    raise EncoderError(
        ErrorCode.INVALID_REQUEST, "content_hash must be of the form sha256:<64 hexadecimal digits>", param=name
    )
