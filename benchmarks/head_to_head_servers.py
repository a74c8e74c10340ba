"""The two servers that are measured beside each other, each with one compute thread per replica."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.processes import memory_of, process_cpu_s
from benchmarks.world import free_port, one_thread_env, world

_ROOT = Path(__file__).parents[1]
_START_S = 300.0
_END_S = 30.0
_GRACE_S = 3.0
# Rows as values of 4 bytes on both sides; `auto` would be bfloat16 with SGLang, which this machine may only emulate.
_COMMON = ("--dtype", "float32", "--encoder-transfer-backend", "zmq_to_tokenizer")


@dataclass
class Running:
    """One that is ready; `end_s` and `left` are known after its end."""

    port: int
    root: psutil.Process
    end_s: float = 0.0
    left: list[str] = field(default_factory=list)
    """Command lines of its processes that outlived the SIGTERM to the one that was started."""

    def members(self) -> list[psutil.Process]:
        """All its processes that live now: of ours torchrun, too."""
        return [self.root, *self.root.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        total = 0.0
        for process in self.members():
            with contextlib.suppress(OSError):  # it has ended
                total += process_cpu_s(process.pid)
        return total

    def pss(self) -> int:
        """Bytes."""
        total = 0
        for process in self.members():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += memory_of(process.pid)["Pss"]
        return total


@dataclass(frozen=True)
class SGLang:
    """How its server is started. `torchvision_site` is a folder with torchvision."""

    python: str
    torchvision_site: str
    image_processor_backend: str
    max_batch_size: int

    def env(self) -> dict[str, str]:
        return {
            **one_thread_env(),
            "PYTHONPATH": str(_ROOT),
            "TORCHVISION_SITE": str(Path(self.torchvision_site).resolve()),
            "SGLANG_ENCODER_MAX_BATCH_SIZE": str(self.max_batch_size),
        }


@contextlib.contextmanager
def ours(model_path: str, dp: int) -> Iterator[Running]:
    """Without its cache, since the other has none unless it is told to."""
    with world(model_path, *_COMMON, "--cache-bytes", "0", dp=dp) as started:
        running = Running(urlsplit(started.url).port or 0, started.server.root)
        yield running
        members, began = running.members(), time.monotonic()
    running.end_s = time.monotonic() - began
    running.left = _left(members)


@contextlib.contextmanager
def sglang(given: SGLang, model_path: str, dp: int) -> Iterator[Running]:
    """SGLang's own, started by `head_to_head_sglang.py`.

    Raises RuntimeError, and writes the log's end to stderr, where it does not get ready.
    """
    port = free_port()
    command = [given.python, str(_ROOT / "benchmarks" / "head_to_head_sglang.py"), "--encoder-only", "--device", "cpu"]
    command += ["--model-path", model_path, "--port", str(port), "--dp-size", str(dp), "--log-level", "warning"]
    command += ["--image-processor-backend", given.image_processor_backend, *_COMMON]
    with tempfile.TemporaryFile() as log:
        main = subprocess.Popen(command, stdout=log, stderr=log, env=given.env(), start_new_session=True)
        running = Running(port, psutil.Process(main.pid))
        members = running.members()
        try:
            _wait_ready(f"http://127.0.0.1:{port}/health", main)
            yield running
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            if main.poll() is None:
                members = running.members()
            began = time.monotonic()
            main.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(_END_S)
            running.end_s = time.monotonic() - began
            running.left = _left(members)


def _left(members: Sequence[psutil.Process]) -> list[str]:
    """Kills those that still run, and tells which they were."""
    left = []
    _, alive = psutil.wait_procs(members, timeout=_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline()))
                process.kill()
    return left


def _wait_ready(health: str, main: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if main.poll() is not None:
            raise RuntimeError(f"SGLang's server ended with exit code {main.returncode} before it was ready")
        try:
            with urllib.request.urlopen(health, timeout=40):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"SGLang's server was not ready within {_START_S:g} s")
