"""Rows from a world into another process's memory, as SGLang's mooncake backend has it.

By default the engine in both processes is a stand-in; `make mooncake` runs this with Mooncake itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq

from tests.harness.landing import FAKE_MOONCAKE
from tests.harness.reference import QwenReference
from tests.harness.sglang_receiver import read_head
from tests.harness.world import World, data_uri, noise_png, off_by

SITE = os.environ.get("MOONCAKE_SITE", str(FAKE_MOONCAKE))
"""The folder that holds the package `mooncake`."""
SIZES = [(112, 84), (56, 56), (200, 60), (28, 300), (140, 140)]
PICTURES = [noise_png(90 + index, width, height) for index, (width, height) in enumerate(SIZES)]
PARTS = [PICTURES[:3], PICTURES[3:]]
NUM_BYTES = 2**20

pytestmark = pytest.mark.timeout(240)


def on_path(site: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH", ""))))}


class Rank:
    """One rank of a language server: memory in a process of its own, and a socket for messages."""

    def __init__(self) -> None:
        script = Path(__file__).parents[1] / "harness" / "memory_process.py"
        self.process = subprocess.Popen(
            [sys.executable, script, str(NUM_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **on_path(SITE)},
        )
        words = self._line("memory").split()
        self.session, self.address = words[1], int(words[2])
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def _line(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError("the process with the memory has ended")

    def memory(self, folder: Path) -> bytes:
        assert self.process.stdin is not None
        path = folder / "memory"
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        self._line("saved")
        return path.read_bytes()

    def send(self, http: httpx.Client, sizes: dict[str, Any], offset: int = 0, count: int = 1) -> httpx.Response:
        body = {
            **sizes,
            "prefill_host": "127.0.0.1",
            "embedding_port": self.port,
            "session_id": self.session,
            "buffer_address": self.address + offset,
            "receive_count": count,
        }
        return http.post("/send", json=body)

    def heads(self, number: int) -> list[Any]:
        found = []
        for _ in range(number):
            assert self.socket.poll(20_000)
            (head,) = self.socket.recv_multipart()
            found.append(read_head(head))
        assert not self.socket.poll(100)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.context.destroy(linger=0)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def world(qwen_tiny: Path) -> Iterator[World]:
    flags = ("--encoder-transfer-backend", "mooncake", "--mooncake-protocol", "tcp", "--send-timeout-s", "10")
    flags = ("--model-path", str(qwen_tiny), "--cache-bytes", "0", *flags)
    with World(*flags, nproc=2, env=on_path(SITE)) as world:
        yield world.start().wait_ready(replicas=2)


def encode(world: World, rid: str, index: int) -> dict[str, Any]:
    body = {
        "mm_items": [data_uri(picture) for picture in PARTS[index]],
        "num_parts": len(PARTS),
        "part_idx": index,
        "req_id": f"{rid}_local_part_{index}",
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": None,
    }
    reply = world.http.post("/encode", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_two_ranks_have_transformers_rows(world: World, qwen_tiny: Path, tmp_path: Path) -> None:
    reference = QwenReference(qwen_tiny)
    expected = np.concatenate([reference.tokens(picture) for picture in PICTURES])
    sizes = [encode(world, "r", index) for index in range(len(PARTS))]
    ask = {"req_id": "r_local_part_1", "part_idx": 1}
    told = world.http.post("/scheduler_receive_meta_data", json=ask).json()
    assert told.items() <= sizes[1].items()
    assert sum(part["embedding_size"] for part in sizes) == expected.nbytes
    with Rank() as one, Rank() as two, ThreadPoolExecutor(4) as threads:
        calls = []
        for rank in (one, two):
            offset = 0
            for part in sizes:
                calls.append(threads.submit(rank.send, world.http, part, offset, 2))
                offset += part["embedding_size"]
        for call in calls:
            assert call.result().status_code == 200, call.result().text
        for rank in (one, two):
            rows = np.frombuffer(rank.memory(tmp_path)[: expected.nbytes], np.float32).reshape(expected.shape)
            assert off_by(rows, expected) <= 1e-5
            heads = sorted(rank.heads(2), key=lambda head: head.part_idx)
            assert [head.shape for head in heads] == [[p["embedding_len"], p["embedding_dim"]] for p in sizes]
            assert [len(head.grid_dim) for head in heads] == [len(part) for part in PARTS]


def test_a_receiver_that_was_killed_costs_its_part_only(world: World, tmp_path: Path) -> None:
    lost, kept = encode(world, "killed", 0), encode(world, "killed", 1)
    with Rank() as dead, Rank() as alive:
        dead.process.kill()
        dead.process.wait()
        reply = dead.send(world.http, lost)
        assert (reply.status_code, dead.session in reply.json()["message"]) == (502, True), reply.text
        assert alive.send(world.http, kept).status_code == 200
        assert any(alive.memory(tmp_path)[: kept["embedding_size"]])


def test_memory_that_was_not_registered_is_refused(world: World, tmp_path: Path) -> None:
    sizes = encode(world, "far", 0)
    with Rank() as rank:
        assert rank.send(world.http, sizes, NUM_BYTES).status_code == 502
        assert not any(rank.memory(tmp_path))


def test_a_receiver_that_stands_still_holds_nobody_up(world: World, tmp_path: Path) -> None:
    stuck, kept = encode(world, "still", 0), encode(world, "still", 1)
    with Rank() as still, Rank() as alive, ThreadPoolExecutor(1) as threads:
        still.process.send_signal(signal.SIGSTOP)
        call = threads.submit(still.send, world.http, stuck)
        assert alive.send(world.http, kept).status_code == 200
        assert not call.done()
        assert call.result().status_code == 502
        assert "within 10 s" in call.result().json()["message"]


def test_a_killed_writer_is_started_anew(world: World, tmp_path: Path) -> None:
    first, second = encode(world, "writer", 0), encode(world, "writer", 1)
    with Rank() as rank:
        assert rank.send(world.http, first).status_code == 200
        pid = world.find("spmd_encoder writer")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        replies = [rank.send(world.http, second)]
        if replies[0].status_code == 502:  # it was given to the dying one
            replies.append(rank.send(world.http, encode(world, "writer-again", 1)))
        assert replies[-1].status_code == 200, replies[-1].text
        assert world.find("spmd_encoder writer") not in {None, pid}
        assert world.http.get("/health").status_code == 200


def test_without_mooncake_the_world_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "mooncake"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')\n")
    with World("--encoder-transfer-backend", "mooncake", env=on_path(str(tmp_path)), torchrun=False) as world:
        assert world.start().wait_end() == [2]
        assert "libibverbs.so.1" in world.log() and "pip install 'spmd-encoder[mooncake]'" in world.log()
        world.assert_nothing_left()


def test_the_writer_ends_with_the_world(qwen_tiny: Path) -> None:
    flags = ("--model-path", str(qwen_tiny), "--encoder-transfer-backend", "mooncake", "--mooncake-protocol", "tcp")
    with World(*flags, env=on_path(SITE)) as world:
        world.start().wait_ready()
        assert world.find("spmd_encoder writer") is not None
        world.note_processes()
        world.terminate()
        world.wait_end()
        assert world.exit_codes() == {0: 0}
        world.assert_nothing_left()
