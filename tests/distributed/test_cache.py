"""Results are kept and shared: an equal item is encoded once, and its answer is the same bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.harness.world import World, noise_png


@pytest.fixture(scope="module")
def world(qwen_tiny: Path) -> Iterator[World]:
    # A result of 84 x 84 pixels is 9 rows of 96 float32: a cache of four of them.
    flags = ("--model-path", str(qwen_tiny), "--cache-bytes", str(4 * 9 * 96 * 4))
    with World(*flags, nproc=2) as world:
        yield world.start().wait_ready(replicas=2)


def tower_items(world: World) -> int:
    """Items that went through the tower, probes too; heartbeats bring the number twice a second."""
    lines = world.http.get("/metrics").text.splitlines()
    return sum(int(float(x.split()[-1])) for x in lines if x.startswith("spmd_encoder_scheduler_batch_items_total{"))


def test_an_equal_item_comes_out_of_the_cache_of_the_replica_that_has_it(world: World) -> None:
    picture, other = noise_png(1, 84, 84), noise_png(2, 84, 84)
    first = world.post([picture])
    assert first.headers["x-spmd-cached"] == "0"
    for _ in range(4):
        again = world.post([other, picture, picture])
        assert again.headers["x-spmd-cached"] in ("2", "3")
        entries = again.json()["data"]
        assert entries[1]["embedding"] == entries[2]["embedding"] == first.json()["data"][0]["embedding"]
        assert entries[1] | {"index": 0} == first.json()["data"][0]
    assert world.post([picture]).headers["x-spmd-replica"] == first.headers["x-spmd-replica"]


def test_what_was_dropped_is_encoded_anew_and_is_the_same(world: World) -> None:
    picture = noise_png(3, 84, 84)
    (want,) = world.encode([picture])
    world.encode([noise_png(100 + n, 84, 84) for n in range(20)])
    reply = world.post([picture])
    assert reply.headers["x-spmd-cached"] == "0"
    (got,) = world.encode([picture])
    assert np.array_equal(got, want)


def test_many_at_once_are_encoded_once(world: World) -> None:
    picture = noise_png(4, 840, 840)  # too large for this cache
    time.sleep(1.2)  # two heartbeats: the number is then that of all before
    before = tower_items(world)
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda _: world.post([picture] * 16), range(4)))
    entries = [entry for reply in replies for entry in reply.json()["data"]]
    assert len(entries) == 64
    assert len({entry["embedding"] for entry in entries}) == 1
    world.wait_for("the heartbeat", lambda: tower_items(world) > before)
    assert tower_items(world) - before <= 4 + 2, "one for each client that came alone, and the idle replicas' probes"


def test_a_new_worker_starts_with_nothing(world: World) -> None:
    picture = noise_png(6, 84, 84)
    replica = int(world.post([picture]).headers["x-spmd-replica"])
    assert world.post([picture]).headers["x-spmd-cached"] == "1"
    os.kill(world.pid("worker", replica), signal.SIGKILL)
    world.wait_for("healing", lambda: world.epoch(replica) == 1 and world.info()["ready"]["replicas_ready"] == 2)
    assert world.post([picture]).headers["x-spmd-cached"] == "0"
