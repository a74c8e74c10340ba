"""What every front end needs, whatever its protocol: items from bytes, and outcomes back in request order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spmd_encoder.api.service import EncoderService
from spmd_encoder.api.types import (
    NO_OPTIONS,
    EncodeRequest,
    ItemFailure,
    ItemOptions,
    ItemOutcome,
    MediaItem,
    Modality,
    ModelInfo,
    OutputKind,
    ReadyState,
)
from spmd_encoder.config import Config
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.base import Header
from spmd_encoder.media.data_uri import check_size, parse_data_uri
from spmd_encoder.media.fetch import is_remote
from spmd_encoder.media.registry import media_kind

MAX_REQUEST_ID_CHARS = 128

ParsedItem = MediaItem | EncoderError
"""An item that may be sent on, or why it may not."""

ItemNaming = Callable[[int], str]
"""How errors name an item of a request by its index, in the protocol's own terms."""


class FrontEnd(Protocol):
    """Serves one protocol on a socket that is bound and listens already, inside the caller's event loop."""

    async def serve(self) -> None:
        """Serve until `stop`; return when the replies in flight are sent. Cancelling it ends all at once."""
        ...

    def stop(self, timeout_s: float | None = None) -> None:
        """Accept nothing new; after `timeout_s` seconds what still runs is cancelled. May be called again."""
        ...


@dataclass(frozen=True)
class RemoteItem:
    """An item that is a URL and not fetched yet (`frontends.remote`)."""

    modality: Modality
    url: str
    options: ItemOptions = NO_OPTIONS


SourceItem = ParsedItem | RemoteItem


@dataclass(frozen=True)
class ItemLimits:
    """Most bytes of one media file, and most pixels and seconds by its header."""

    max_bytes: int
    max_pixels: int
    max_audio_seconds: float = math.inf
    max_video_seconds: float = math.inf

    @classmethod
    def of(cls, config: Config) -> ItemLimits:
        return cls(
            max_bytes=config.server.max_image_bytes,
            max_pixels=config.server.max_image_pixels,
            max_audio_seconds=config.media.max_audio_seconds,
            max_video_seconds=config.media.max_video_seconds,
        )

    def check(self, modality: Modality, header: Header) -> None:
        """Raises `EncoderError` TOO_LARGE for a sound or film that its own header says to be too long."""
        limit = self.max_audio_seconds if modality is Modality.AUDIO else self.max_video_seconds
        if header.seconds > limit:
            raise EncoderError(
                ErrorCode.TOO_LARGE,
                f"the item lasts {header.seconds:.1f} s, more than the limit of {limit:g} s "
                f"(--max-{modality.value}-seconds)",
            )


def item_name(index: int) -> str:
    """How errors name an item of a request where the protocol has no other way."""
    return f"items[{index}]"


def build_item(modality: Modality, data: bytes, limits: ItemLimits, options: ItemOptions = NO_OPTIONS) -> MediaItem:
    """One item from its file's bytes: hashes them and reads the header. Not for an event loop.

    Raises `EncoderError`: INVALID_REQUEST where it is empty, TOO_LARGE, MEDIA_UNSUPPORTED or MEDIA_CORRUPT.
    """
    if not data:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the item is empty: it has no bytes")
    check_size(len(data), limits.max_bytes)
    header = media_kind(modality).probe(data, None if modality is Modality.AUDIO else limits.max_pixels)
    limits.check(modality, header)
    return MediaItem(
        modality=modality,
        data=data,
        digest=f"sha256:{hashlib.sha256(data).hexdigest()}",
        width=header.width,
        height=header.height,
        seconds=header.seconds,
        frames=header.frames,
        options=options,
    )


def read_item(
    modality: Modality, data: bytes, limits: ItemLimits, name: str, options: ItemOptions = NO_OPTIONS
) -> ParsedItem:
    """`build_item`, but the failure is a value, said of the item's `name`. Not for an event loop."""
    try:
        return build_item(modality, data, limits, options)
    except EncoderError as error:
        return error.at(name)  # a fresh exception: the caught one's traceback holds the bytes


def parse_item(
    modality: Modality, text: str, limits: ItemLimits, name: str, options: ItemOptions = NO_OPTIONS
) -> SourceItem:
    """An item from its data URI or URL; its failure is a value, said of the item's `name`. Not for an event loop."""
    if is_remote(text):
        return RemoteItem(modality, text, options)
    try:
        data = parse_data_uri(text, max_bytes=limits.max_bytes).data
    except EncoderError as error:
        return error.at(name)
    return read_item(modality, data, limits, name, options)


def parse_items(modality: Modality, texts: list[str], limits: ItemLimits, name: ItemNaming) -> list[SourceItem]:
    """`parse_item` for all of a request's items. Empties `texts` as it goes, so that each is in memory only once."""
    items: list[SourceItem] = []
    for index in range(len(texts)):
        items.append(parse_item(modality, texts[index], limits, name(index)))
        texts[index] = ""
    return items


def check_count(num_items: int, max_items: int, *, param: str = "items") -> None:
    """Raises `EncoderError` where a request has no item, or more than `--max-items-per-request`."""
    if num_items == 0:
        raise EncoderError(ErrorCode.INVALID_REQUEST, "the request has no item", param=param)
    if num_items > max_items:
        raise EncoderError(
            ErrorCode.TOO_LARGE,
            f"the request has more items than the limit of {max_items} (--max-items-per-request)",
            param=param,
        )


def check_request_id(request_id: str) -> str:
    """Raises `EncoderError` unless it is 1 to 128 printable ASCII characters (it goes to logs and headers)."""
    if 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable():
        return request_id
    raise EncoderError(
        ErrorCode.INVALID_REQUEST,
        f"a request id is 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters",
        param="request_id",
    )


def known_model(service: EncoderService) -> ModelInfo:
    """What is served. Raises `EncoderError` NOT_READY where that is not known yet."""
    info = service.model_info()
    if info is None:
        raise EncoderError(ErrorCode.NOT_READY, "no replica has been up yet", retry_after_s=1.0)
    return info


def check_model(service: EncoderService, served_name: str, model: str | None) -> str:
    """The name of what is served. Raises `EncoderError` MODEL_NOT_FOUND where `model` is another one."""
    info = service.model_info()
    name = served_name if info is None else info.name
    if model is None or model in (name, served_name):
        return name
    raise EncoderError(
        ErrorCode.MODEL_NOT_FOUND, f"the model that the request names is not served here; {name} is", param="model"
    )


def check_output(service: EncoderService, output: OutputKind | None) -> None:
    """Raises `EncoderError` INVALID_REQUEST where the model, if known yet, does not give `output`."""
    info = service.model_info()
    if output is not None and info is not None and output not in info.outputs:
        raise EncoderError(
            ErrorCode.INVALID_REQUEST,
            f"{info.name} has no {output} output; it has {', '.join(info.outputs)}",
            param="output",
        )


def is_ready(state: ReadyState) -> bool:
    """Whether a load balancer should send requests here."""
    return state.started and state.ready and not state.draining


async def encode_items(
    service: EncoderService,
    parsed: Sequence[ParsedItem],
    *,
    request_id: str,
    output: OutputKind | None = None,
    deadline_s: float | None = None,
    name: ItemNaming = item_name,
) -> list[ItemOutcome]:
    """Encode the good items, and give every item its outcome, in request order; `name` is how failures name items.

    Raises `EncoderError` where the service refuses the request as a whole. The service is not asked where no item
    is good.
    """
    good = tuple(item for item in parsed if isinstance(item, MediaItem))
    encoded: Sequence[ItemOutcome] = ()
    if good:
        request = EncodeRequest(request_id=request_id, items=good, output=output, deadline_s=deadline_s)
        encoded = await service.encode(request)
        if len(encoded) != len(good):
            raise EncoderError(ErrorCode.INTERNAL, f"{len(good)} items were encoded to {len(encoded)} results")
    rest = iter(encoded)
    outcomes: list[ItemOutcome] = []
    for index, item in enumerate(parsed):
        outcome = next(rest) if isinstance(item, MediaItem) else ItemFailure(error=item)
        if isinstance(outcome, ItemFailure):
            # The service counts only the good items; the caller counts all of them.
            outcome = ItemFailure(error=outcome.error.at(name(index)), replica=outcome.replica)
        outcomes.append(outcome)
    return outcomes


def replicas_of(outcomes: Sequence[ItemOutcome]) -> list[int]:
    """The replicas that answered, sorted."""
    return sorted({o.replica for o in outcomes if o.replica is not None and o.replica >= 0})
