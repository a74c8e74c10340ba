"""SGLang's request bodies, checked and in our terms. Not for an event loop: a body may hold megabytes."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.base import ItemLimits
from spmd_encoder.frontends.sglang.dialect import EncodeCall
from spmd_encoder.frontends.sglang.media import read_items, read_modality
from spmd_encoder.frontends.sglang.parts import MAX_RECEIVERS
from spmd_encoder.frontends.sglang.refusal import RefusalError
from spmd_encoder.transports.base import ParcelHeader, PushEndpoint, RemoteMemory, is_host
from spmd_encoder.transports.registry import PushBackend

MAX_ID_CHARS = 512
# What may differ between two tries of one call.
_DIGESTED = ("modality", "num_parts", "part_idx", "prefill_host", "embedding_port", "mm_items")
_HOST_PORT = re.compile(r"(?:tcp://)?(?:\[([^\[\]]+)\]|([^\[\]:]+)):([0-9]{1,5})")

Fields = dict[str, msgspec.Raw]

# What is said again is bounded, since it is held while the part is encoded.
_MAX_ECHO_FIELDS, _MAX_ECHO_BYTES = 32, 1024


@dataclass(frozen=True)
class Registration:
    part_id: str
    receiver: PushEndpoint
    count: int


def read_fields(body: bytearray | bytes) -> Fields:
    """The body's members, undecoded. Raises `RefusalError` 422 where it is no JSON object, as SGLang answers."""
    try:
        return msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, RecursionError):
        raise RefusalError(422, "the body is not a JSON object") from None


def part_id_of(fields: Fields) -> str:
    """Raises `RefusalError` 400."""
    part_id = _field(fields, "req_id")
    if isinstance(part_id, str) and 0 < len(part_id) <= MAX_ID_CHARS:
        return part_id
    raise RefusalError(400, f"missing or invalid req_id: it is a string of 1 to {MAX_ID_CHARS} characters")


def read_encode(
    fields: Fields, backend: PushBackend, *, max_items: int, limits: ItemLimits, deadline: float = math.inf
) -> EncodeCall:
    """Raises `RefusalError` 400 where it is not known which part it is, or who gets it; what is wrong with the items
    is a part's own failure."""
    part_id = part_id_of(fields)
    num_parts = _whole(fields, "num_parts")
    if num_parts is None or num_parts <= 0:
        raise RefusalError(400, "num_parts must be a positive integer")
    part_idx = _whole(fields, "part_idx")
    if part_idx is None or not 0 <= part_idx < num_parts:
        raise RefusalError(400, f"part_idx must be in [0, {num_parts})")
    modality = _field(fields, "modality")
    if not isinstance(modality, str):
        raise RefusalError(400, "missing or invalid modality")
    try:
        kind = read_modality(modality)
    except EncoderError as error:
        raise RefusalError.of(error) from None
    receivers = _receivers(fields, backend)
    digest = hashlib.sha256()
    for name in _DIGESTED:
        digest.update(bytes(fields.get(name, b"null")) + b"\0")
    given = _field(fields, "mm_items")
    fields.clear()
    try:
        if given is None or given == []:
            raise EncoderError(ErrorCode.INVALID_REQUEST, "missing or empty mm_items")
        items: Any = read_items(given, kind, max_items=max_items, limits=limits)
    except EncoderError as error:
        items = EncoderError(error.code, error.message, param=error.param)
    header = ParcelHeader(part_id=part_id, num_parts=num_parts, part_idx=part_idx, modality=kind)
    return EncodeCall(header=header, items=items, digest=digest.digest(), receivers=receivers, deadline=deadline)


def read_registration(fields: Fields, backend: PushBackend) -> Registration:
    """Raises `RefusalError` 400."""
    if not backend.registers:
        raise RefusalError(
            400, f"this server runs --encoder-transfer-backend {backend.name}, where receivers do not register"
        )
    part_id = part_id_of(fields)
    receiver = _host_port(_field(fields, "receive_url"), "receive_url")
    count = _whole(fields, "receive_count")
    if count is None:
        raise RefusalError(400, "receive_count must be an integer")
    return Registration(part_id, receiver, count)


@dataclass(frozen=True)
class Fetch:
    """A receiver, one of `count`, has room for a part's rows."""

    part_id: str
    memory: RemoteMemory
    count: int


def read_fetch(fields: Fields, backend: PushBackend) -> Fetch:
    """Raises `RefusalError` 400."""
    if not backend.is_fetched:
        raise RefusalError(
            400,
            f"/send belongs to the mooncake backend; this server runs --encoder-transfer-backend {backend.name}, which "
            "pushes embeddings by itself",
        )
    part_id = part_id_of(fields)
    host, session, address = (_field(fields, name) for name in ("prefill_host", "session_id", "buffer_address"))
    if not isinstance(host, str):
        raise RefusalError(400, "prefill_host must be a host name")
    endpoint = _endpoint(host.strip("[]"), _field(fields, "embedding_port"), "embedding_port")
    if not isinstance(address, int) or isinstance(address, bool) or not 0 < address < 2**64:
        raise RefusalError(400, "buffer_address must be the address of the receiver's buffer")
    count = _whole(fields, "receive_count")
    # Older receivers do not say how many they are: rows then wait for as long as rows may wait.
    count = MAX_RECEIVERS if count is None else count
    return Fetch(part_id, RemoteMemory(endpoint, _host_port(session, "session_id"), address), count)


def echo_of(fields: Fields) -> Fields:
    """What a reply says again of its request: all but the items."""
    short = ((name, bytes(raw)) for name, raw in fields.items() if name != "mm_items")
    echo = {name: msgspec.Raw(value) for name, value in short if len(name) + len(value) <= _MAX_ECHO_BYTES}
    return dict(itertools.islice(echo.items(), _MAX_ECHO_FIELDS))


def part_index_of(fields: Fields) -> int:
    """Raises `RefusalError` 400."""
    part_idx = _whole(fields, "part_idx")
    if part_idx is None:
        raise RefusalError(400, "part_idx must be an integer")
    return part_idx


def _receivers(fields: Fields, backend: PushBackend) -> tuple[PushEndpoint, ...]:
    """Those that the request names: `prefill_host` with one port, or a port per rank."""
    host, ports = _field(fields, "prefill_host"), _field(fields, "embedding_port")
    if backend.is_fetched:
        return ()
    if ports is None:
        if backend.registers:
            return ()
        raise RefusalError(
            400,
            f"embedding_port is missing: this server runs --encoder-transfer-backend {backend.name}; start both with "
            "the same value",
        )
    listed = ports if isinstance(ports, list) else [ports]
    if not isinstance(host, str) or not listed or len(listed) > 1024:
        raise RefusalError(400, "prefill_host must be a host name, and embedding_port a port or a list of ports")
    return tuple(dict.fromkeys(_endpoint(host.strip("[]"), port, "embedding_port") for port in listed))


def _host_port(text: object, name: str) -> PushEndpoint:
    match = _HOST_PORT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise RefusalError(400, f"{name} must be of the form host:port")
    return _endpoint(match[1] or match[2], int(match[3]), name)


def _endpoint(host: str, port: object, name: str) -> PushEndpoint:
    if not is_host(host):
        raise RefusalError(400, f"{name}: the host is neither a name nor an address")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise RefusalError(400, f"{name}: the port must be 1 to 65535")
    return PushEndpoint(host, port)


def _whole(fields: Fields, name: str) -> int | None:
    value = _field(fields, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _field(fields: Fields, name: str) -> Any:
    """The member's value; None where there is none. Raises `RefusalError` 400 for one that cannot be read."""
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name])
    except (msgspec.DecodeError, RecursionError):
        raise RefusalError(400, f"{name} is no valid JSON, or nested too deeply") from None
