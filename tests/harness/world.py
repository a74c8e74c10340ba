"""A real world for tests: torchrun (or plain python) on CPU, driven over HTTP and by real signals."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

STALL_S = 15
"""A busy machine keeps processes waiting, which is no stall; tests that look for stalls have limits of their own."""
ENDS = re.compile(r"rank (\d+) ends with exit code (\d+)")
DTYPES = {"float32": np.float32, "float16": np.float16}


def free_port() -> int:
    """Below those that the kernel gives to connections, which would take it in the seconds until it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def noise_png(seed: int, width: int, height: int) -> bytes:
    """A picture that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return png(Image.fromarray(pixels))


def vector(entry: dict[str, Any]) -> np.ndarray[Any, Any]:
    """An ok entry's embedding as float32 numpy."""
    raw = base64.b64decode(entry["embedding"])
    if entry["dtype"] == "bfloat16":
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(entry["shape"])
    return np.frombuffer(raw, DTYPES[entry["dtype"]]).astype(np.float32).reshape(entry["shape"])


def off_by(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """Largest difference over largest value."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.abs(got - want).max() / np.abs(want).max())


@dataclass(frozen=True)
class Seen:
    """A process of the world; the start time guards against a pid's second life."""

    pid: int
    started: float
    name: str

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


class World:
    """`command` replaces `-m spmd_encoder` and what follows; by default torchrun starts `dp * tp` ranks."""

    def __init__(
        self,
        *flags: str,
        nproc: int = 1,
        torchrun: bool = True,
        torchrun_flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        agents: int = 1,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="world-"))
        self.log_path = self.folder / "log"
        # A temporary folder of its own shows whatever the world leaves behind.
        self.tmp = self.folder / "t"
        self.tmp.mkdir()
        fixed = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.tmp), "SPMD_ENCODER_STALL_TIMEOUT_S": str(STALL_S)}
        self.env = {**os.environ, **fixed, **(env or {})}
        tail = ["-m", "spmd_encoder", "--port", str(self.port), *flags]
        run = ["-m", "torch.distributed.run"]
        self.commands: list[list[str]] = []
        if not torchrun:
            self.commands = [[sys.executable, *tail]]
        elif agents == 1:
            self.commands = [[sys.executable, *run, "--nproc-per-node", str(nproc), *torchrun_flags, *tail]]
        else:
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "t"]
            for index in range(agents):
                host = ["--rdzv-conf", f"is_host={int(index == 0)}", "--local-addr", "127.0.0.1"]
                nodes = ["--nnodes", str(agents), "--nproc-per-node", str(nproc)]
                self.commands.append([sys.executable, *run, *nodes, *rendezvous, *host, *torchrun_flags, *tail])
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.seen: set[Seen] = set()
        self.http = httpx.Client(base_url=self.url, timeout=60)

    # -- life

    def start(self) -> World:
        with self.log_path.open("ab") as log:
            for command in self.commands:
                self.launchers.append(
                    subprocess.Popen(command, env=self.env, stdout=log, stderr=log, start_new_session=True)
                )
        return self

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        return self.launchers[0]

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for(self, what: str, condition: Any, timeout_s: float = 120.0) -> Any:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if value := condition():
                    return value
            except (httpx.TransportError, json.JSONDecodeError, KeyError):
                pass
            if all(launcher.poll() is not None for launcher in self.launchers):
                break
            time.sleep(0.05)
        raise AssertionError(f"{what} did not happen within {timeout_s} s\n{self.log()[-6000:]}")

    def wait_ready(self, timeout_s: float = 180.0, replicas: int | None = None) -> World:
        def ready() -> bool:
            reply = self.http.get("/health/ready")
            return reply.status_code == 200 and (replicas is None or reply.json()["replicas_ready"] == replicas)

        self.wait_for("ready", ready, timeout_s)
        self.note_processes()
        return self

    def note_processes(self) -> None:
        """Remember every process of the world that lives now."""
        for launcher in self.launchers:
            try:
                parent = psutil.Process(launcher.pid)
                for process in [parent, *parent.children(recursive=True)]:
                    name = " ".join(process.cmdline())[:60]
                    self.seen.add(Seen(process.pid, process.create_time(), name))
            except psutil.NoSuchProcess:
                continue

    def find(self, title: str) -> int | None:
        """A process of the world by a part of its title, also before there is anybody to ask."""
        for launcher in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    if title in " ".join(process.cmdline()):
                        return int(process.pid)
        return None

    def wait_end(self, timeout_s: float = 60.0) -> list[int]:
        """Exit codes of the launchers."""
        return [launcher.wait(timeout_s) for launcher in self.launchers]

    def exit_codes(self) -> dict[int, int]:
        """The ranks' own last words, by rank."""
        return {int(rank): int(code) for rank, code in ENDS.findall(self.log())}

    def terminate(self, sig: int = signal.SIGTERM) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.send_signal(sig)

    def close(self) -> None:
        """End everything, also after a failed test."""
        self.note_processes()
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait_end(35)
        for seen in self.seen:
            if seen.alive():
                os.kill(seen.pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        self.http.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self.close()
        if failure is None:  # else its log may be wanted
            shutil.rmtree(self.folder, ignore_errors=True)

    def assert_nothing_left(self, within_s: float = 20.0) -> None:
        """No process, no port, nothing in the temporary folder."""
        end = time.monotonic() + within_s
        while any(seen.alive() for seen in self.seen) and time.monotonic() < end:
            time.sleep(0.05)
        alive = [seen for seen in self.seen if seen.alive()]
        assert not alive, alive
        left = [p.name for p in self.tmp.glob("spmd_encoder*")]
        assert not left, left
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))

    # -- questions

    def info(self) -> dict[str, Any]:
        reply = self.http.get("/info")
        reply.raise_for_status()
        return dict(reply.json())

    def pid(self, role: str, rank: int = 0) -> int:
        found = [p["pid"] for p in self.info()["processes"] if p["role"] == role and p["rank"] == rank]
        assert len(found) == 1, (role, rank, self.info()["processes"])
        return int(found[0])

    def epoch(self, replica: int) -> int:
        return int(self.info()["replicas"][replica]["epoch"])

    def post(self, pictures: Sequence[bytes], **fields: Any) -> httpx.Response:
        items = [{"image": data_uri(picture)} for picture in pictures]
        return self.http.post("/v1/encode", json={"items": items, **fields})

    def encode(self, pictures: Sequence[bytes], **fields: Any) -> list[np.ndarray[Any, Any]]:
        reply = self.post(pictures, **fields)
        assert reply.status_code == 200, reply.text[:500]
        return [vector(entry) for entry in reply.json()["data"]]
