"""Bodies of 16 MB: what their way through the server costs, and whether others wait for it."""

from __future__ import annotations

import base64
import io
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.checkpoints import Tower, model_path
from benchmarks.connection import RAW, Connection
from benchmarks.load_generator.requests import body_of, unlike
from benchmarks.load_generator.tally import latency_ms, percentile
from benchmarks.report import Cell, Check, Plot, Report, Table
from benchmarks.scenario import Options as Common
from benchmarks.scenario import Scenario
from benchmarks.world import World, world

_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    tower: Tower = "siglip-tiny"
    """One whose own work does not grow with the picture."""
    megabytes: int = 16
    requests: int = 24
    """Of each kind of body."""
    clients: int = 2


def run(options: Options) -> Report:
    file = _bitmap(options.megabytes * 10**6)
    arms = {}
    with world(model_path(options.tower), "--cache-bytes", "0", device=options.device) as served:
        for name, bodies in _bodies(file, options.requests).items():
            arms[name] = _measure(served, bodies, options.clients)
    rows: list[Sequence[Cell]] = [
        [
            name,
            a["per_s"],
            a["mb_per_s"],
            a["p50_ms"],
            a["front_ms_per_mb"],
            a["server_ms"],
            a["health_p99_ms"],
            a["pss"],
        ]
        for name, a in arms.items()
    ]
    columns = ["body", "requests/s", "MB/s", "p50 ms", "front end's CPU ms per MB", "server's CPU ms each"]
    return Report(
        checks=[
            Check(name=f"{name}: front end's CPU per MB of picture", measured=a["front_ms_per_mb"], unit="ms")
            for name, a in arms.items()
        ]
        + [
            Check(
                name="/health/live meanwhile, p99", measured=max(a["health_p99_ms"] for a in arms.values()), unit="ms"
            )
        ],
        tables=[
            Table(f"A bitmap of {len(file) / 1e6:.1f} MB", [*columns, "/health/live p99 ms", "PSS after MiB"], rows)
        ],
        plots=[
            Plot(
                kind="bars",
                title="CPU of one request",
                x_label="",
                y_label="ms",
                series={
                    "front end": [(name, a["front_ms"]) for name, a in arms.items()],
                    "whole server": [(name, a["server_ms"]) for name, a in arms.items()],
                },
            )
        ],
        figures=arms,
    )


def _bitmap(num_bytes: int) -> bytes:
    side = round((num_bytes / 3) ** 0.5)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "BMP")
    return out.getvalue()


def _bodies(file: bytes, count: int) -> dict[str, Iterator[tuple[bytes, str]]]:
    """So many (body, type) of each kind, no two alike."""
    files, pixel = [unlike(file, number) for number in range(2)], _pixel()
    return {
        "as it is": ((files[n % 2], RAW) for n in range(count)),
        "form": (body_of([files[n % 2], pixel]) for n in range(count)),
        "JSON": (_json(files[n % 2]) for n in range(count)),
    }


def _pixel() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    return out.getvalue()


def _json(file: bytes) -> tuple[bytes, str]:
    return b'{"items": [{"image": "data:;base64,' + base64.b64encode(file) + b'"}]}', "application/json"


def _measure(served: World, bodies: Iterator[tuple[bytes, str]], clients: int) -> dict[str, Any]:
    bodies = iter(list(bodies))
    seconds: list[float] = []
    megabytes: list[float] = []
    lock = threading.Lock()

    def client() -> None:
        with Connection(served.url) as connection:
            while True:
                with lock:
                    body, kind = next(bodies, (b"", ""))
                if not body:
                    return
                seconds.append(connection.encode(body, kind).seconds)
                megabytes.append(len(body) / 1e6)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    with _health(served) as health_s, served.spending() as spent:
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.perf_counter() - began
    return {
        "requests": len(seconds),
        "per_s": len(seconds) / wall_s,
        "mb_per_s": sum(megabytes) / wall_s,
        "p50_ms": 1e3 * percentile(sorted(seconds), 50),
        "front_ms": 1e3 * spent["keeper"] / len(seconds),
        "front_ms_per_mb": 1e3 * spent["keeper"] / sum(megabytes),
        "server_ms": 1e3 * sum(spent.values()) / len(seconds),
        "latency_ms": latency_ms(seconds),
        "health_p99_ms": 1e3 * percentile(sorted(health_s), 99),
        "pss": served.server.total_pss() / 2**20,
    }


@contextmanager
def _health(served: World) -> Iterator[list[float]]:
    """Asks again and again while the block runs; seconds of each answer."""
    seconds: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(_POLL_S):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{served.url}/health/live", timeout=60):
                seconds.append(time.perf_counter() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield seconds
    finally:
        over.set()
        asking.join()


SCENARIO = Scenario(
    name="large-bodies",
    about="Pictures of 16 MB, as they are, in a form, in JSON: rates, the front end's CPU, and who asks meanwhile.",
    full=Options(),
    quick=Options(requests=4),
    run=run,
)
