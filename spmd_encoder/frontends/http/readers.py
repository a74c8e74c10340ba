"""From a request to its items and options, whatever its content type: JSON, a form with files, or one raw file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import TypeVar, assert_never

from spmd_encoder.api.types import NO_OPTIONS, Modality
from spmd_encoder.frontends.base import ItemLimits, SourceItem, check_count, item_name, read_item
from spmd_encoder.frontends.http.body import read_body
from spmd_encoder.frontends.http.call import Call
from spmd_encoder.frontends.http.content import BodyKind, body_kind, declared_modality
from spmd_encoder.frontends.http.decode import decode_json
from spmd_encoder.frontends.http.form import Form
from spmd_encoder.frontends.http.items import ItemBody, source_of
from spmd_encoder.frontends.http.options import Options, merged, query_options
from spmd_encoder.media.registry import guess_modality

T = TypeVar("T")

# A form is parsed in blocks of about this size, so that a change of threads costs little beside the work.
_BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True)
class ParsedRequest:
    items: list[SourceItem]
    options: Options


class _Body(Options, frozen=True, kw_only=True):
    items: list[ItemBody]


async def read_encode_request(call: Call) -> ParsedRequest:
    """Read, decode, check, hash and price a whole request; an item's own fault is its value.

    Raises `EncoderError` or `HttpError` for the request as a whole, as `body_kind`, `query_options`, `body_chunks`
    and `merged` do.
    """
    kind = body_kind(call.request, *BodyKind)
    query = query_options(call.request)
    match kind:
        case BodyKind.JSON:
            backend = call.backend
            parse = partial(_parse_json, query=query, max_items=backend.max_items, limits=backend.item_limits)
            parsed = await read_json(call, parse)
        case BodyKind.MULTIPART:
            parsed = await _read_form(call, query)
        case BodyKind.RAW:
            parsed = await _read_raw(call, query)
        case _:
            assert_never(kind)
    return ParsedRequest(parsed.items, merged(query, parsed.options))


async def read_json(call: Call, parse: Callable[[bytearray], T]) -> T:
    """What `parse` makes of the whole body."""
    body = await read_body(call.body())
    return await call.read(partial(parse, body), len(body))


def _parse_json(body: bytearray, *, query: Options, max_items: int, limits: ItemLimits) -> ParsedRequest:
    decoded = decode_json(body, _Body)
    body.clear()  # from here on the text of the items is enough; the account is kept until the reply is done
    check_count(len(decoded.items), max_items)
    sampling = merged(query, decoded).sampling
    items: list[SourceItem] = []
    while decoded.items:  # emptied as it goes, so that each item is in memory only once
        items.append(source_of(decoded.items.pop(0), sampling, limits, item_name(len(items))))
    return ParsedRequest(items, decoded)


async def _read_form(call: Call, query: Options) -> ParsedRequest:
    backend = call.backend
    form = Form(call.request.headers["content-type"], max_items=backend.max_items, limits=backend.item_limits)
    block: list[bytes] = []
    size = total = 0
    async for chunk in call.body():
        block.append(chunk)
        size += len(chunk)
        total += len(chunk)
        if size >= _BLOCK_BYTES:
            await backend.run(partial(form.feed, b"".join(block)))
            block, size = [], 0
    items, options = await call.read(partial(form.finish, b"".join(block), query), total)
    return ParsedRequest([*items], options)


async def _read_raw(call: Call, query: Options) -> ParsedRequest:
    file = BytesIO()  # gives its bytes away without a copy
    async for chunk in call.body():
        file.write(chunk)
    data, limits = file.getvalue(), call.backend.item_limits
    modality = declared_modality(call.request) or guess_modality(data)
    options = query.sampling if modality is Modality.VIDEO else NO_OPTIONS
    read = partial(read_item, modality, data, limits, item_name(0), options)
    return ParsedRequest([await call.read(read, len(data))], Options())
