"""A real preparer process: what it answers, and what it says on stderr meanwhile."""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.config import Config
from spmd_encoder.errors import ErrorCode
from spmd_encoder.wire.messages import PreparerSpec
from spmd_encoder.wire.preparing import FromPreparer, Prepare, PreparedItem, PrepareFailed, PreparerReady
from spmd_encoder.wire.streams import FrameSocket, Pipe
from tests.harness.world import noise_png

pytestmark = pytest.mark.timeout(120)


class Running:
    def __init__(self, sock: socket.socket, pid: int, config: Config) -> None:
        self.pid, self.config = pid, config
        self._wire: FrameSocket[FromPreparer] = FrameSocket(sock, FromPreparer)
        assert isinstance(self._wire.receive(), PreparerReady)
        self.stderr = ""

    def ask(self, media: bytes, digest: str = "sha256:0") -> FromPreparer:
        self._wire.send(Prepare(digest=digest, modality=Modality.IMAGE, media_bytes=len(media)), [media])
        reply = self._wire.receive()
        if isinstance(reply, PreparedItem):
            for num_bytes in () if reply.is_shared else reply.tensor_bytes:
                self._wire.receive_frame(num_bytes)
        return reply


@contextmanager
def preparer(
    folder: Path,
    log_level: str = "info",
    max_image_pixels: int = 4000,
    memory_bytes: int | None = None,
    exit_code: int = 0,
) -> Iterator[Running]:
    """One process as a leader has it. When the context is left it ends, with `exit_code`, and its `stderr` is whole."""
    config = Config()
    config = dataclasses.replace(
        config,
        server=dataclasses.replace(config.server, max_image_pixels=max_image_pixels),
        limits=dataclasses.replace(config.limits, preparer_memory_bytes=memory_bytes),
        observability=dataclasses.replace(config.observability, log_level=log_level),
    )
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(
            [sys.executable, "-m", "spmd_encoder.keeper.child", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        Pipe(ours).send(
            PreparerSpec(config=config.to_json(), folder=str(folder), rank=5, dp_rank=2, tp_rank=1, epoch=7)
        )
        ours.setblocking(True)
        running = Running(ours, process.pid, config)
        yield running
    running.stderr = process.communicate(timeout=60)[1]
    assert process.returncode == exit_code


def damaged_tiffs() -> list[bytes]:
    out = io.BytesIO()
    Image.effect_noise((64, 48), 50).save(out, "TIFF", compression="tiff_lzw")
    choose = random.Random(3)
    pictures = []
    for _ in range(20):
        data = bytearray(out.getvalue())
        for place in choose.sample(range(8, len(data)), 5):
            data[place] = choose.randrange(256)
        pictures.append(bytes(data))
    return pictures


def jpeg(width: int, height: int, **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, "JPEG", **options)
    return out.getvalue()


BAD_EXIF = jpeg(40, 30, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09\xff\xff garbage")


def test_limits_hold_and_decoders_words_stay_out_of_the_log(dinov2_tiny: Path) -> None:
    with preparer(dinov2_tiny, max_image_pixels=4000) as running:
        outcomes = [running.ask(picture) for picture in (*damaged_tiffs(), BAD_EXIF)]
        assert isinstance(outcomes[-1], PreparedItem)
        assert any(isinstance(outcome, PrepareFailed) for outcome in outcomes)
        assert isinstance(running.ask(jpeg(40, 100)), PreparedItem)
        for height in (101, 300):  # Pillow's own limit is twice as high
            refused = running.ask(jpeg(40, height))
            assert isinstance(refused, PrepareFailed)
            assert refused.code is ErrorCode.TOO_LARGE
            assert "limit of 4000 (--max-image-pixels)" in refused.message
    assert [line for line in running.stderr.splitlines() if "rank=5 dp=2 tp=1 preparer" not in line] == []
    assert "tempfile.tif" not in running.stderr, "libtiff's name for what it reads"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's memory")
def test_what_one_item_frees_is_there_for_the_next(qwen_tiny: Path) -> None:
    """The system would clear a thousand pages for each of these, which takes longer than their arithmetic."""
    picture = jpeg(224, 224)
    with preparer(qwen_tiny, max_image_pixels=10**6) as running:
        for _ in range(3):
            running.ask(picture)
        before = page_faults(running.pid)
        for _ in range(10):
            assert isinstance(running.ask(picture), PreparedItem)
        assert page_faults(running.pid) - before < 10 * 100


def test_what_fails_leaves_nothing_behind(qwen_tiny: Path) -> None:
    """Not its file, nor what was decoded of it: a traceback may hold both."""
    with preparer(qwen_tiny, max_image_pixels=10**8) as running:
        damaged = bytearray(noise_png(0, 1200, 1200))
        damaged[len(damaged) // 2 :] = bytes(len(damaged) // 2)
        for _ in range(3):
            running.ask(bytes(damaged))
        before = psutil.Process(running.pid).memory_info().rss
        for _ in range(40):
            assert isinstance(running.ask(bytes(damaged)), PrepareFailed)
        assert psutil.Process(running.pid).memory_info().rss - before < 60 * 2**20


def page_faults(pid: int) -> int:
    """That needed no disk: proc_pid_stat(5), field 10."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_debug_lets_decoders_speak(dinov2_tiny: Path) -> None:
    with preparer(dinov2_tiny, "debug") as running:
        for picture in (*damaged_tiffs(), BAD_EXIF):
            running.ask(picture)
    assert "tempfile.tif" in running.stderr
    assert "UserWarning" in running.stderr
