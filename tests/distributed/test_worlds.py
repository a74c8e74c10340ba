"""Worlds of every shape give transformers' numbers over HTTP, and end cleanly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.harness.reference import QwenReference
from tests.harness.world import World, data_uri, noise_png, off_by, vector

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3)]
SIZES = [(56, 56), (112, 84), (200, 60), (28, 300), (140, 140), (33, 47), (224, 112), (99, 99)]


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [noise_png(i, width, height) for i, (width, height) in enumerate(SIZES)]


@pytest.fixture(scope="module")
def expected(qwen_tiny: Path, pictures: list[bytes]) -> list[np.ndarray[Any, Any]]:
    reference = QwenReference(qwen_tiny)
    return [reference.tokens(picture) for picture in pictures]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"dp{shape[0]}tp{shape[1]}")
def world(request: pytest.FixtureRequest, qwen_tiny: Path) -> Iterator[tuple[World, int, int]]:
    dp, tp = request.param
    # Without a cache, so that every answer goes through the tower.
    flags = (
        *("--model-path", str(qwen_tiny), "--tp-size", str(tp), "--collective-timeout-s", "4"),
        *("--cache-bytes", "0"),
    )
    with World(*flags, nproc=dp * tp) as world:
        world.start().wait_ready(replicas=dp)
        yield world, dp, tp
        # Every world is also a test of the end.
        world.note_processes()
        world.terminate()
        world.wait_end()
        assert world.exit_codes() == dict.fromkeys(range(dp * tp), 0), world.log()[-3000:]
        world.assert_nothing_left()


def test_singles_equal_transformers(
    world: tuple[World, int, int], pictures: list[bytes], expected: list[np.ndarray[Any, Any]]
) -> None:
    served, _, tp = world
    for picture, want in zip(pictures, expected, strict=True):
        (got,) = served.encode([picture])
        assert off_by(got, want) <= (1e-6 if tp == 1 else 1e-5)


def test_mixed_sizes_in_one_request_equal_transformers(
    world: tuple[World, int, int], pictures: list[bytes], expected: list[np.ndarray[Any, Any]]
) -> None:
    served, dp, tp = world
    got = served.encode(pictures * 3)
    for one, want in zip(got, expected * 3, strict=True):
        assert off_by(one, want) <= (1e-6 if tp == 1 else 1e-5)
    if dp > 1:
        assert len(served.post(pictures * 3).headers["x-spmd-replica"].split(",")) > 1


def test_many_clients_good_and_bad_items(
    world: tuple[World, int, int], pictures: list[bytes], expected: list[np.ndarray[Any, Any]]
) -> None:
    """64 clients at once, each with a good, a corrupt and a good item: every one is answered, the good ones right."""
    served, _, _ = world
    failures: list[str] = []

    def client(index: int) -> None:
        first, last = index % len(pictures), (index * 3 + 1) % len(pictures)
        items = [{"image": data_uri(pictures[first])}, {"image": data_uri(pictures[0][:60])}]
        reply = served.http.post("/v1/encode", json={"items": [*items, {"image": data_uri(pictures[last])}]})
        data = reply.json()["data"]
        if reply.status_code != 200 or [e["status"] for e in data] != ["ok", "error", "ok"]:
            failures.append(reply.text[:300])
        elif data[1]["error"]["code"] != "MEDIA_CORRUPT" or data[1]["error"]["param"] != "items[1]":
            failures.append(str(data[1]))
        elif max(off_by(vector(data[0]), expected[first]), off_by(vector(data[2]), expected[last])) > 1e-5:
            failures.append("wrong numbers")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures[:3]


def test_every_process_is_told(world: tuple[World, int, int]) -> None:
    served, dp, tp = world
    info = served.info()
    assert info["layout"] == {"world_size": dp * tp, "dp_size": dp, "tp_size": tp}
    workers = [p for p in info["processes"] if p["role"] == "worker"]
    assert [w["rank"] for w in workers] == list(range(dp * tp))
    for worker in workers:
        assert worker["preloaded"] is True
        title = f"spmd_encoder worker rank={worker['rank']} dp={worker['dp_rank']} tp={worker['tp_rank']} epoch=0"
        assert psutil.Process(worker["pid"]).cmdline()[0] == title
    keepers = [p for p in info["processes"] if p["role"] == "keeper"]
    assert [k["rank"] for k in keepers] == list(range(dp * tp))
    for keeper in keepers:
        mapped = Path(f"/proc/{keeper['pid']}/maps").read_text()
        assert "libtorch" not in mapped, "a keeper must never import torch"
    assert psutil.Process(served.pid("nursery")).cmdline()[0] == "spmd_encoder nursery"


def test_an_idle_world_outlives_the_collective_timeout(
    world: tuple[World, int, int], pictures: list[bytes], expected: list[np.ndarray[Any, Any]]
) -> None:
    served, dp, _ = world
    time.sleep(5.0)  # the worlds here run with a timeout of 4 s
    for _ in range(2 * dp):
        assert off_by(served.encode([pictures[0]])[0], expected[0]) <= 1e-5
    assert [replica["epoch"] for replica in served.info()["replicas"]] == [0] * dp
