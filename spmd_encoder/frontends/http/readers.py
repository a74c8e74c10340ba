"""From a request to its items and options, whatever its content type: JSON, a form with files, or one raw file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import assert_never

import msgspec
from starlette.requests import Request

from spmd_encoder.api.types import Modality
from spmd_encoder.frontends.base import SourceItem, check_count, item_name, parse_items, read_item
from spmd_encoder.frontends.http.backend import Backend
from spmd_encoder.frontends.http.body import Account, read_body
from spmd_encoder.frontends.http.content import BodyKind, body_kind
from spmd_encoder.frontends.http.decode import decode_json
from spmd_encoder.frontends.http.form import Form
from spmd_encoder.frontends.http.options import Options, merged, query_options

# A form is parsed in blocks of about this size, so that a change of threads costs little beside the work.
_BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True)
class ParsedRequest:
    items: list[SourceItem]
    options: Options


class _Item(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    image: str


class _Body(Options, frozen=True, kw_only=True):
    items: list[_Item]

    def options(self) -> Options:
        return Options(
            output=self.output,
            encoding_format=self.encoding_format,
            request_id=self.request_id,
            model=self.model,
        )


async def read_request(request: Request, backend: Backend, account: Account) -> ParsedRequest:
    """Read, decode, check, hash and price a whole request; an item's own fault is its value.

    Raises `EncoderError` or `HttpError` for the request as a whole, as `body_kind`, `query_options`, `body_chunks`
    and `merged` do.
    """
    kind = body_kind(request, *BodyKind)
    query = query_options(request)
    match kind:
        case BodyKind.JSON:
            parsed = await _read_json(request, backend, account)
        case BodyKind.MULTIPART:
            parsed = await _read_form(request, backend, account)
        case BodyKind.RAW:
            parsed = await _read_raw(request, backend, account)
        case _:
            assert_never(kind)
    return ParsedRequest(parsed.items, merged(query, parsed.options))


async def _read_json(request: Request, backend: Backend, account: Account) -> ParsedRequest:
    body = await read_body(backend.body_of(request, account))
    return await backend.run(partial(_parse_json, body, backend))


def _parse_json(body: bytearray, backend: Backend) -> ParsedRequest:
    decoded = decode_json(body, _Body)
    body.clear()  # from here on the text of the items is enough; the account is kept until the reply is done
    check_count(len(decoded.items), backend.max_items)
    texts = [item.image for item in decoded.items]
    decoded.items.clear()
    return ParsedRequest(parse_items(Modality.IMAGE, texts, backend.item_limits, item_name), decoded.options())


async def _read_form(request: Request, backend: Backend, account: Account) -> ParsedRequest:
    form = Form(request.headers["content-type"], max_items=backend.max_items, limits=backend.item_limits)
    block: list[bytes] = []
    size = 0
    async for chunk in backend.body_of(request, account):
        block.append(chunk)
        size += len(chunk)
        if size >= _BLOCK_BYTES:
            await backend.run(partial(form.feed, b"".join(block)))
            block, size = [], 0
    items, options = await backend.run(partial(form.finish, b"".join(block)))
    return ParsedRequest([*items], options)


async def _read_raw(request: Request, backend: Backend, account: Account) -> ParsedRequest:
    file = BytesIO()  # gives its bytes away without a copy
    async for chunk in backend.body_of(request, account):
        file.write(chunk)
    data = file.getvalue()
    item = await backend.run(partial(read_item, Modality.IMAGE, data, backend.item_limits, item_name(0)))
    return ParsedRequest([item], Options())
