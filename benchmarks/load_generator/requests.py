"""From what a request shall hold to its bytes, and from its reply to a sample's fields."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Sequence
from typing import Any

from benchmarks.load_generator.mix import Item

_COMMENT = b"\xff\xfe"
_START = b"\xff\xd8"


def file_of(item: Item, pools: Sequence[Sequence[bytes]], seed: int = 0) -> bytes:
    """The item's file, equal for equal items of equal seeds and for no others."""
    pool = pools[item.kind]
    return unlike(pool[item.serial % len(pool)], item.serial, seed)


def unlike(file: bytes, serial: int, seed: int = 0) -> bytes:
    """The same picture in a file of its own: a JPEG with a comment in front, any other with bytes at its end."""
    text = struct.pack(">QQ", seed, serial)
    if file.startswith(_START):
        return _START + _COMMENT + struct.pack(">H", 2 + len(text)) + text + file[2:]
    return file + text


def body_of(files: Sequence[bytes]) -> tuple[bytes, str]:
    """(body, its type): one file as it is, several as a form."""
    if len(files) == 1:
        return files[0], "application/octet-stream"
    boundary = uuid.uuid4().hex
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="i"\r\n\r\n'.encode()
    parts = b"".join(head + file + b"\r\n" for file in files)
    return parts + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def stages_ms(server_timing: str) -> dict[str, float]:
    """Milliseconds by stage (`total`, `queue`, `forward`, ...), out of a reply's header `Server-Timing`."""
    parts = (part.strip().split(";dur=") for part in server_timing.split(","))
    return {part[0]: float(part[1]) for part in parts if len(part) == 2}


def error_code(status: int, body: bytes) -> str:
    """The server's own code, else the status."""
    try:
        found: Any = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        found = None
    return found if isinstance(found, str) else f"HTTP_{status}"


def items_failed(body: bytes) -> str | None:
    """The code of the first bad item of a safetensors reply with status 200, if there is one."""
    (length,) = struct.unpack("<Q", body[:8])
    entries = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["response"])["data"]
    return next((str(entry["error"]["code"]) for entry in entries if entry["status"] == "error"), None)
