"""Requests as an SGLang language server makes them, for any server that speaks its dialect: each over a connection of
its own, with the rows sent to a PULL socket of its own."""

from __future__ import annotations

import asyncio
import base64
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from benchmarks.bare_http import ask, json_request
from benchmarks.load_generator.requests import unlike

_ROWS_S = 60.0


@dataclass
class Load:
    """What a closed loop got: seconds from its first request to its last rows, and each request's own."""

    elapsed_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.latency_s)

    @property
    def per_s(self) -> float:
        return self.requests / self.elapsed_s

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.latency_s) * 1e3


async def encode(port: int, context: zmq.asyncio.Context, name: str, picture: bytes) -> bytes:
    """The rows of one picture, when they and the reply are here. The message's head, a pickle, is searched, not read.

    Raises RuntimeError where the reply is not 200 or something else than the request's rows came, TimeoutError where
    nothing did.
    """
    with context.socket(zmq.PULL) as receiver:
        receiver.linger = 0
        fields = {
            "req_id": name,
            "num_parts": 1,
            "part_idx": 0,
            "modality": "IMAGE",
            "mm_items": ["data:image/jpeg;base64," + base64.b64encode(picture).decode()],
            "prefill_host": "127.0.0.1",
            "embedding_port": receiver.bind_to_random_port("tcp://127.0.0.1"),
        }
        status = await ask(port, json_request("/encode", fields, close=True))
        if status != "200":
            raise RuntimeError(f"/encode was answered with {status}")
        async with asyncio.timeout(_ROWS_S):
            frames = await receiver.recv_multipart()
    if len(frames) != 2 or name.encode() not in frames[0]:
        raise RuntimeError(f"{len(frames)} frames came that are not {name}'s rows")
    return frames[1]


def closed_loop(port: int, pictures: Sequence[bytes], serials: Iterator[int], clients: int, seconds: float) -> Load:
    """Each client asks again when its rows are here, and the last ones after `seconds` are waited for, so that all
    batches are whole. No two files are equal as long as no serial comes twice."""

    gc.collect()
    gc.freeze()  # what this process has imported is not looked through while it measures

    async def run() -> Load:
        load = Load()
        with zmq.asyncio.Context() as context:
            began = time.perf_counter()

            async def client() -> None:
                while (sent := time.perf_counter()) - began < seconds:
                    serial = next(serials)
                    await encode(port, context, f"part-{serial:09}", unlike(pictures[serial % len(pictures)], serial))
                    load.latency_s.append(time.perf_counter() - sent)

            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(client())
            load.elapsed_s = time.perf_counter() - began
        return load

    return asyncio.run(run())


def rows_of(port: int, pictures: Sequence[bytes]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Each picture's values, of a server that runs in float32."""

    async def run() -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        with zmq.asyncio.Context() as context:
            parts = [await encode(port, context, f"rows-{i}", picture) for i, picture in enumerate(pictures)]
        return [np.frombuffer(part, np.float32) for part in parts]

    return asyncio.run(run())
