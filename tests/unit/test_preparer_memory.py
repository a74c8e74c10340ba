"""A preparer's memory is bounded: files that are made to take much of it cost themselves, and nothing else."""

from __future__ import annotations

import dataclasses
import lzma
import re
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_encoder.api.types import Modality
from spmd_encoder.config import Config, parse_config
from spmd_encoder.errors import ErrorCode, StartupError
from spmd_encoder.media.memory import FIXED_BYTES, default_memory_bytes, is_out_of_memory
from spmd_encoder.wire.preparing import PreparedItem, PrepareFailed
from spmd_encoder.wire.streams import MAX_FRAME_BYTES
from tests.unit.test_preparer import jpeg, preparer

pytestmark = pytest.mark.timeout(120)

MOST = 2**28
DEFLATE, LZMA = 8, 34925
SHORT, LONG = 3, 4


def tiff_of_one_tile(side: int, data: bytes, compression: int) -> bytes:
    """A picture of 16 x 16 pixels, RGBA of 16 bits, in one tile of `side` x `side`, of which `data` is the content."""
    fields = [
        *((256, LONG, 16), (257, LONG, 16), (258, SHORT, None), (259, SHORT, compression), (262, SHORT, 2)),
        *((277, SHORT, 4), (322, LONG, side), (323, LONG, side), (324, LONG, None), (325, LONG, len(data))),
        (338, SHORT, 2),
    ]
    depths = struct.pack("<4H", 16, 16, 16, 16)
    at = {258: 8 + 2 + 12 * len(fields) + 4}
    at[324] = at[258] + len(depths)
    entries = b"".join(
        struct.pack("<HHII", tag, kind, 4 if tag == 258 else 1, at.get(tag, value) if value is None else value)
        for tag, kind, value in fields
    )
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + depths + data


def zeros(side: int) -> bytes:
    """Deflated, so that some hundred KB become `side` * `side` pixels."""
    packer = zlib.compressobj(1)
    return b"".join(packer.compress(bytes(side * 8)) for _ in range(side)) + packer.flush()


def with_dictionary(xz: bytes, size: int) -> bytes:
    """An .xz stream whose only block asks for a dictionary of 4 GiB (`size` 40), whatever its content needs.

    A block's header is its length / 4 - 1, flags, and per filter its id, the length of its properties, and these: for
    LZMA2 one byte. https://tukaani.org/xz/xz-file-format.txt
    """
    length = (xz[12] + 1) * 4
    header = bytearray(xz[12 : 12 + length - 4])
    place = header.index(b"\x21\x01") + 2
    header[place] = size
    return xz[:12] + header + struct.pack("<I", zlib.crc32(header)) + xz[12 + length :]


def test_a_picture_that_takes_too_much_fails_alone(dinov2_tiny: Path) -> None:
    side = 6000
    crafted = tiff_of_one_tile(side, zeros(side), DEFLATE)
    assert len(crafted) < 2**21 < MOST < side * side * 8
    assert side * side < Config().server.max_image_pixels, "so that this limit does not catch it"
    with preparer(dinov2_tiny, max_image_pixels=100_000_000, memory_bytes=MOST) as running:
        for _ in range(2):
            refused = running.ask(crafted)
            assert isinstance(refused, PrepareFailed)
            assert refused.code is ErrorCode.TOO_LARGE
            assert "--preparer-memory-bytes" in refused.message
            assert isinstance(running.ask(jpeg(400, 300)), PreparedItem)
    assert "Traceback" not in running.stderr


def test_a_dictionary_that_takes_too_much_fails_alone(dinov2_tiny: Path) -> None:
    plain = lzma.compress(bytes(16 * 16 * 8), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**16}])
    with preparer(dinov2_tiny, max_image_pixels=4000, memory_bytes=MOST) as running:
        assert isinstance(running.ask(tiff_of_one_tile(16, plain, LZMA)), PreparedItem)
        refused = running.ask(tiff_of_one_tile(16, with_dictionary(plain, 40), LZMA))
        assert isinstance(refused, PrepareFailed)
        assert refused.code in (ErrorCode.TOO_LARGE, ErrorCode.MEDIA_CORRUPT)
        assert isinstance(running.ask(jpeg(40, 30)), PreparedItem)


def test_a_process_that_has_no_memory_for_a_message_says_so_and_ends(dinov2_tiny: Path) -> None:
    """Where the next message begins is not known any more; the item is another process's."""
    with preparer(dinov2_tiny, exit_code=1) as running:
        resource.prlimit(running.pid, resource.RLIMIT_DATA, (0, 0))
        with pytest.raises(ConnectionError):
            running.ask(jpeg(40, 30), digest="0" * (MAX_FRAME_BYTES - 1024))
    (line,) = running.stderr.splitlines()
    assert "preparer" in line and "--preparer-memory-bytes" in line


@pytest.mark.parametrize("given", [None, MOST, 0])
def test_what_the_kernel_is_told(dinov2_tiny: Path, given: int | None) -> None:
    with preparer(dinov2_tiny, memory_bytes=given) as running:
        limits = Path(f"/proc/{running.pid}/limits").read_text()
        status = Path(f"/proc/{running.pid}/status").read_text()
    told = re.search(r"^Max data size +(\S+) +(\S+)", limits, re.MULTILINE)
    taken = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    assert told is not None and taken is not None
    if given == 0:
        assert told[1] == "unlimited"
        return
    pictures = default_memory_bytes(running.config, [Modality.IMAGE])
    assert told[1] == told[2], "it cannot be raised again"
    # What it took by itself when it was told, and a little since then.
    assert 0 <= int(taken[1]) * 1024 - (int(told[1]) - (pictures if given is None else given)) < 2**26


def test_the_default_follows_the_limits_of_what_the_family_takes() -> None:
    small = parse_config(["--max-image-pixels", "1000000", "--max-image-bytes", "1000"], {})[0]
    assert default_memory_bytes(small, [Modality.IMAGE]) == FIXED_BYTES + 17_000_000 + 3000
    assert default_memory_bytes(small, []) == FIXED_BYTES + 3000
    large = dataclasses.replace(small, server=dataclasses.replace(small.server, max_image_pixels=10**9))
    by_modality = [default_memory_bytes(large, [modality]) for modality in Modality]
    assert default_memory_bytes(large, Modality) == max(by_modality)
    assert default_memory_bytes(large, [Modality.IMAGE]) > default_memory_bytes(small, [Modality.IMAGE])


def test_a_limit_that_leaves_no_room_is_refused() -> None:
    for given in ("1", str(MOST - 1), "-1"):
        with pytest.raises(StartupError, match="--preparer-memory-bytes must be"):
            parse_config(["--preparer-memory-bytes", given], {})
    assert parse_config(["--preparer-memory-bytes", "0"], {})[0].limits.preparer_memory_bytes == 0


WAYS = {
    "numpy": "numpy.zeros(2**30)",
    "torch": "torch.zeros(2**30)",
    "Pillow": "PIL.Image.new('RGB', (20000, 20000))",
    "Python": "bytes(2**30)",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_librarys_words_are_known(way: str) -> None:
    script = f"""
import numpy, torch, PIL.Image
from spmd_encoder.media.memory import is_out_of_memory, limit_memory
limit_memory(2**28)
try:
    {WAYS[way]}
except Exception as error:
    print(is_out_of_memory(error))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_other_failures_are_none_of_memory() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.zeros(2).reshape(3)
    with pytest.raises(ValueError, match="reshape") as of_numpy:
        np.zeros(2).reshape(3)
    for error in (of_torch.value, of_numpy.value, OSError("decoder error -2"), KeyError("out of memory")):
        assert not is_out_of_memory(error)
