"""What caches hold is told, and given for a digest alone; what is late never begins its forward. In real worlds."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.world import World, data_uri, noise_png

RESULT_BYTES = 9 * 96 * 4  # of 84 x 84 pixels
SLOW = noise_png(500, 84, 84)


def digest(picture: bytes) -> str:
    return "sha256:" + hashlib.sha256(picture).hexdigest()


@pytest.fixture(scope="module")
def world(qwen_tiny: Path) -> Iterator[World]:
    flags = ("--model-path", str(qwen_tiny), "--cache-bytes", str(4 * RESULT_BYTES))
    with World(*flags, nproc=2) as world:
        yield world.start().wait_ready(replicas=2)


@pytest.fixture(scope="module")
def slow_world(qwen_tiny: Path) -> Iterator[World]:
    """One replica that encodes items one by one, and `SLOW` in a second."""
    flags = ("--model-path", str(qwen_tiny), "--max-batch-items", "1", "--cache-bytes", "0")
    with World(*flags, env={"SPMD_ENCODER_FAULTS": f"slow@{digest(SLOW)}"}) as world:
        yield world.start().wait_ready()


def lookup(world: World, *pictures: bytes, **more: Any) -> list[dict[str, Any]]:
    reply = world.http.post("/v1/lookup", json={"digests": [digest(picture) for picture in pictures], **more})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"])


def by_digest(world: World, *pictures: bytes) -> httpx.Response:
    return world.http.post("/v1/encode", json={"items": [{"digest": digest(picture)} for picture in pictures]})


def test_what_is_held_is_told_and_given_without_its_bytes(world: World) -> None:
    picture, other = noise_png(1, 84, 84), noise_png(2, 84, 84)
    assert [entry["held"] for entry in lookup(world, picture, other)] == [False, False]
    first = world.post([picture])
    entry, missing = lookup(world, picture, other)
    sent = first.json()["data"][0]
    assert (entry["held"], missing["held"]) == (True, False)
    assert [str(replica) for replica in entry["replicas"]] == [first.headers["x-spmd-replica"]]
    names = ("shape", "dtype", "num_tokens", "grid", "digest")
    assert {name: entry[name] for name in names} == {name: sent[name] for name in names}
    again = by_digest(world, picture)
    assert again.headers["x-spmd-cached"] == "1"
    assert again.json()["data"] == first.json()["data"], "bit for bit"
    mixed = by_digest(world, other, picture)
    assert [item.get("error", {}).get("code") for item in mixed.json()["data"]] == ["NOT_FOUND", None]
    assert by_digest(world, other).status_code == 404


def test_what_was_dropped_is_not_found_and_is_encoded_anew_with_its_bytes(world: World) -> None:
    picture = noise_png(3, 84, 84)
    first = world.post([picture]).json()["data"]
    world.encode([noise_png(100 + n, 84, 84) for n in range(20)])
    reply = by_digest(world, picture)  # the heartbeat that tells of it may not have come
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "NOT_FOUND")
    world.wait_for("the heartbeat", lambda: not lookup(world, picture)[0]["held"])
    assert world.post([picture]).json()["data"] == first
    assert lookup(world, picture)[0]["held"]


def test_what_was_lost_with_its_worker_is_not_held(world: World) -> None:
    picture = noise_png(4, 84, 84)
    replica = int(world.post([picture]).headers["x-spmd-replica"])
    os.kill(world.pid("worker", replica), signal.SIGKILL)
    world.wait_for("healing", lambda: world.epoch(replica) >= 1 and world.info()["ready"]["replicas_ready"] == 2)
    assert not lookup(world, picture)[0]["held"]
    assert by_digest(world, picture).status_code == 404


def test_what_is_larger_than_the_cache_is_never_held(world: World) -> None:
    picture = noise_png(5, 840, 840)
    world.encode([picture])
    assert not lookup(world, picture)[0]["held"]


def counted(world: World, name: str) -> int:
    lines = world.http.get("/metrics").text.splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith(f"spmd_encoder_scheduler_{name}_total{{")
    )


def post(world: World, pictures: Sequence[bytes], **options: Any) -> httpx.Response:
    return world.http.post("/v1/encode", json={"items": [{"image": data_uri(p)} for p in pictures]}, **options)


def test_what_is_late_never_begins_its_forward(slow_world: World) -> None:
    world = slow_world
    late = [noise_png(600 + n, 84, 84) for n in range(3)]
    time.sleep(1.2)  # two heartbeats: the numbers are then those of all before
    before = counted(world, "batch_items"), counted(world, "dropped")
    with ThreadPoolExecutor(2) as clients:
        slow = clients.submit(world.post, [SLOW])
        world.wait_for("the forward of the slow one", lambda: world.info()["replicas"][0]["outstanding_items"] > 0)
        reply = post(world, late, headers={"x-request-timeout": "0.3"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "DEADLINE_EXCEEDED")
        assert {item["error"]["message"].partition("stage ")[2].split()[0] for item in reply.json()["data"]} <= {
            "queue",
            "preprocess",
        }
        assert slow.result().status_code == 200
    assert world.post([noise_png(700, 84, 84)]).status_code == 200
    world.wait_for("the heartbeat", lambda: counted(world, "batch_items") >= before[0] + 2)
    assert 2 <= counted(world, "dropped") - before[1] <= 3, "the replica had room for two of them"
    probes = 2  # an idle replica encodes one now and then
    assert counted(world, "batch_items") <= before[0] + 2 + probes


def test_a_late_forward_is_told_as_such(slow_world: World) -> None:
    reply = post(slow_world, [SLOW], params={"deadline_ms": 400})
    assert reply.status_code == 504
    assert "in the stage forward" in reply.json()["error"]["message"]
    assert slow_world.post([noise_png(701, 84, 84)]).status_code == 200


def test_the_times_of_a_request_are_told(slow_world: World) -> None:
    reply = slow_world.post([SLOW])
    timing = dict(entry.split(";dur=") for entry in reply.headers["server-timing"].split(", "))
    assert set(timing) == {"total", "queue", "preprocess", "forward", "transfer"}
    assert sum(float(timing[stage]) for stage in timing if stage != "total") >= 1000
    assert max(map(float, timing.values())) == float(timing["total"])
