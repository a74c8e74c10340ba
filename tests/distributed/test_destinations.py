"""A real world's embeddings are transformers', wherever they go; and the README's lines for a receiver, as they are."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from PIL import Image
from safetensors.numpy import load

from spmd_encoder.client.receiver import EmbeddingReceiver
from tests.harness.readme import README
from tests.harness.reference import QwenReference
from tests.harness.world import World, noise_png, off_by

TOLERANCE = 1e-5
SIZES = [(112, 84), (56, 56), (200, 60), (28, 300)]
PICTURES = [noise_png(90 + index, width, height) for index, (width, height) in enumerate(SIZES)]
HASHES = ["picture-0", "picture-1", "picture-2", "picture-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def world(qwen_tiny: Path, folder: Path) -> Iterator[World]:
    flags = ("--model-path", str(qwen_tiny), "--embedding-dir", str(folder))
    # Without a cache, so that every answer goes through the tower.
    with World(*flags, "--cache-bytes", "0", nproc=2) as world:
        yield world.start().wait_ready(replicas=2)


@pytest.fixture(scope="module")
def expected(qwen_tiny: Path) -> list[np.ndarray[Any, Any]]:
    reference = QwenReference(qwen_tiny)
    return [reference.tokens(picture) for picture in PICTURES]


def delivered(world: World, to: dict[str, Any]) -> list[dict[str, Any]]:
    reply = world.post(PICTURES, destination=to, output="tokens")
    assert reply.status_code == 200, reply.text[:500]
    entries = reply.json()["data"]
    assert all("embedding" not in entry for entry in entries)
    return [entry["delivered"] for entry in entries]


def test_files_hold_transformers_rows(world: World, folder: Path, expected: list[Any]) -> None:
    delivered(world, {"type": "file", "mm_hashes": HASHES})
    for mm_hash, rows in zip(HASHES, expected, strict=True):
        tensors = safetensors.torch.load_file(folder / mm_hash / "encoder_cache.safetensors", device="cpu")
        assert off_by(tensors["ec_cache"].numpy(), rows) <= TOLERANCE


def test_a_receiver_gets_transformers_rows(world: World, expected: list[Any]) -> None:
    with EmbeddingReceiver() as receiver:
        delivered(world, {"type": "zmq", "endpoint": receiver.endpoint, "part": {"id": "r"}})
        for index, rows in enumerate(expected):
            header, array = receiver.receive(30)
            assert header.index == index and header.grid is not None
            assert header.num_tokens == np.prod(header.grid) // 4 == len(rows)
            assert off_by(array, rows) <= TOLERANCE


def test_staged_rows_are_transformers(world: World, expected: list[Any]) -> None:
    receipts = delivered(world, {"type": "staged"})
    for receipt, rows in zip(receipts, expected, strict=True):
        reply = world.http.get(f"/v1/staged/{receipt['staged_id']}")
        assert off_by(load(reply.content)["embedding"], rows) <= TOLERANCE
        assert world.http.get(f"/v1/staged/{receipt['staged_id']}").status_code == 404


def test_inline_rows_are_the_same(world: World, expected: list[Any]) -> None:
    for got, rows in zip(world.encode(PICTURES, destination={"type": "inline"}), expected, strict=True):
        assert off_by(got, rows) <= TOLERANCE


def test_the_readmes_lines_for_a_receiver(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if "EmbeddingReceiver" in code
    ]
    assert "http://localhost:30000" in source
    for index, name in enumerate(("photo.jpg", "other.png")):
        Image.open(io.BytesIO(PICTURES[index])).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(compile(source.replace("http://localhost:30000", world.url), str(README), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["request-42", "0"], ["request-42", "1"]]


def test_a_delivery_under_way_is_finished_by_a_drain(qwen_tiny: Path) -> None:
    """A receiver that takes nothing costs the time that a delivery may take, and its error is the delivery's own."""
    flags = ("--model-path", str(qwen_tiny), "--send-timeout-s", "4")
    with socket.create_server(("127.0.0.1", 0)) as mute, World(*flags) as world, ThreadPoolExecutor(1) as pool:
        world.start().wait_ready(replicas=1)
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        reply = pool.submit(
            world.post, PICTURES[:1], destination={"type": "zmq", "endpoint": endpoint}, output="tokens"
        )
        connection, _ = mute.accept()
        with connection:
            world.terminate()
            answer = reply.result(timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "DELIVERY_FAILED")
        assert world.wait_end() is not None
        assert world.exit_codes() == {0: 0}
