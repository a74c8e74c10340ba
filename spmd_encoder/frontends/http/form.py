"""A multipart/form-data body: every file part is an item, every text part an option. Parsed as it comes, in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from spmd_encoder.api.types import NO_OPTIONS, ItemOptions, Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits, ParsedItem, check_count, item_name, read_item
from spmd_encoder.frontends.http.decode import shortened
from spmd_encoder.frontends.http.options import OPTION_NAMES, Options, given_twice, merged, options_of
from spmd_encoder.media.data_uri import check_size
from spmd_encoder.media.registry import guess_modality

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# None: what the file's content shows.
_MODALITIES: Mapping[str, Modality | None] = MappingProxyType(
    {
        **dict.fromkeys(("image", "images", "images[]"), Modality.IMAGE),
        "audio": Modality.AUDIO,
        "video": Modality.VIDEO,
        "file": None,
    }
)
FILE_NAMES = tuple(_MODALITIES)
_MAX_OPTION_BYTES = 4096
# Taking a header's parameters apart takes some 2 us for each, and the square of a long header; real ones have three.
_MAX_PARAMETERS = 64
_PLAIN_ENCODINGS = frozenset({b"", b"7bit", b"8bit", b"binary"})


class Form:
    """Takes the body block by block. A part's name alone says whether it is a file; its filename and its declared
    type are ignored, and nothing is ever written to disk. Not for an event loop.

    An item that is too large is that item's failure, and its bytes are dropped as they come.
    """

    def __init__(self, content_type: str, *, max_items: int, limits: ItemLimits) -> None:
        """Raises `EncoderError` INVALID_REQUEST where `content_type` has no usable boundary."""
        self._max_items = max_items
        self._limits = limits
        self._files: list[tuple[Modality | None, bytes | EncoderError]] = []
        self._fields: list[tuple[str, str]] = []
        self._num_bytes = 0
        self._is_complete = False
        self._closing = b""
        # As if a line ended before the form, so that a first boundary is like any other.
        self._tail = b"\r\n"
        self._start_part()
        self._parser = self._new_parser(content_type)

    def feed(self, block: bytes) -> None:
        """Raises `EncoderError` INVALID_REQUEST for a malformed form, TOO_LARGE for too many items."""
        rest = block if self._is_complete else b""
        try:
            self._parser.write(block)
        except FormParserError as error:
            # The parser's own words may quote the body.
            where = self._num_bytes + max(0, getattr(error, "offset", 0))
            raise _invalid(f"the multipart body is malformed near byte {where}") from None
        if self._is_complete and not rest:  # the parser passes over what follows, and does not say where it begins
            rest = (self._tail + block).partition(self._closing)[2]
        if rest.strip():
            raise _invalid("the multipart body goes on after its closing boundary")
        self._tail = (self._tail + block[-len(self._closing) :])[-len(self._closing) :]
        self._num_bytes += len(block)

    def finish(self, block: bytes, query: Options) -> tuple[list[ParsedItem], Options]:
        """Take the last block; what the whole form says, its files read. Raises as `feed` and `options_of` do."""
        self.feed(block)
        if not self._is_complete:
            raise _invalid("the multipart body ends before its closing boundary")
        check_count(len(self._files), self._max_items)
        options = options_of(self._fields)
        sampling = merged(query, options).sampling
        return [self._take(index, sampling) for index in range(len(self._files))], options

    def _new_parser(self, content_type: str) -> MultipartParser:
        _, parameters = _parsed(content_type.encode("latin-1"), "Content-Type")
        boundary = parameters.get(b"boundary")
        if not boundary:
            raise _invalid("the Content-Type multipart/form-data has no boundary")
        self._closing = b"\r\n--" + boundary + b"--"
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._start_part,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        try:
            parser = MultipartParser(boundary, callbacks)
        except FormParserError:
            raise _invalid("the boundary of the multipart body is too long") from None
        # It warns of every malformed body, which any client may send.
        parser.logger = logging.Logger("multipart", logging.CRITICAL)
        return parser

    def _start_part(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._header_name = b""
        self._header_value = b""
        self._name = ""
        self._size = 0
        self._max_size = 0
        self._content = BytesIO()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        self._name = self._part_name()
        if self._name in FILE_NAMES:
            check_count(len(self._files) + 1, self._max_items)
            self._max_size = self._limits.max_bytes
        elif self._name in OPTION_NAMES:
            if any(name == self._name for name, _ in self._fields):  # now, since a body has room for millions
                raise given_twice(self._name)
            self._max_size = _MAX_OPTION_BYTES
        else:
            known, name = ", ".join((*FILE_NAMES, *OPTION_NAMES)), shortened(self._name)
            raise _invalid(f"the form has an unknown part `{name}`; known are {known}", param=name)
        if self._headers.get(b"content-transfer-encoding", b"").strip().lower() not in _PLAIN_ENCODINGS:
            raise _invalid("a part is sent as it is, without Content-Transfer-Encoding", param=self._name)

    def _part_name(self) -> str:
        disposition, parameters = _parsed(self._headers.get(b"content-disposition", b""), "Content-Disposition")
        name = parameters.get(b"name")
        if disposition != b"form-data" or name is None:
            raise _invalid('a part of the form has no header Content-Disposition: form-data; name="..."')
        return name.decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._size <= self._max_size:
            self._content.write(memoryview(data)[start:end])
        elif self._name in OPTION_NAMES:
            raise _invalid(f"`{self._name}` has more than {_MAX_OPTION_BYTES} bytes", param=self._name)
        else:
            self._content = BytesIO()

    def _on_part_end(self) -> None:
        content, self._content = self._content.getvalue(), BytesIO()
        if self._name in FILE_NAMES:
            self._files.append((_MODALITIES[self._name], self._file(content, item_name(len(self._files)))))
            return
        try:
            self._fields.append((self._name, content.decode()))
        except UnicodeDecodeError:
            raise _invalid(f"`{self._name}` is not UTF-8", param=self._name) from None

    def _file(self, content: bytes, name: str) -> bytes | EncoderError:
        try:
            check_size(self._size, self._limits.max_bytes)
        except EncoderError as error:
            return error.at(name)
        return content

    def _take(self, index: int, sampling: ItemOptions) -> ParsedItem:
        """The item of a file, which is forgotten."""
        (modality, file), self._files[index] = self._files[index], (None, b"")
        if isinstance(file, EncoderError):
            return file
        modality = modality or guess_modality(file)
        options = sampling if modality is Modality.VIDEO else NO_OPTIONS
        return read_item(modality, file, self._limits, item_name(index), options)

    def _on_end(self) -> None:
        self._is_complete = True


def _parsed(header: bytes, name: str) -> tuple[bytes, dict[bytes, bytes]]:
    if header.count(b";") > _MAX_PARAMETERS:
        raise _invalid(f"a header {name} has more than {_MAX_PARAMETERS} parameters")
    return parse_options_header(header)


def _invalid(message: str, *, param: str | None = None) -> EncoderError:
    return EncoderError(ErrorCode.INVALID_REQUEST, message, param=param)
