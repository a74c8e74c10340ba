"""Every rank of a real world writes its own trace, and no failure of a profiler costs a rank."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.world import World, noise_png

RANKS = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
LINE = re.compile(r"^rank (\d+) \(dp (\d+), tp (\d+)\): (.*)$", re.MULTILINE)
ALREADY, NOT_RUNNING = "failed: profiling runs already", "failed: profiling does not run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def world(qwen_tiny: Path, folder: Path) -> Iterator[World]:
    flags = ("--model-path", str(qwen_tiny), "--tp-size", "2", "--cache-bytes", "0", "--profile-dir", str(folder))
    with World(*flags, nproc=4) as world:
        world.start().wait_ready(replicas=2)
        yield world
        # A world that records also ends cleanly.
        start(world)
        encode(world, 700, count=4)
        world.terminate()
        world.wait_end()
        assert world.exit_codes() == dict.fromkeys(range(4), 0), world.log()[-3000:]


def said(reply: httpx.Response, status: int = 200) -> list[str]:
    """What each rank answered."""
    assert reply.status_code == status, reply.text
    lines = LINE.findall(reply.text)
    assert [tuple(map(int, line[:3])) for line in lines] == RANKS, reply.text
    return [line[3] for line in lines]


def start(world: World, status: int = 200, **fields: Any) -> list[str]:
    return said(world.http.post("/start_profile", json=fields), status)


def stop(world: World, status: int = 200) -> list[str]:
    return said(world.http.get("/stop_profile"), status)


def events(path: str) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return list(json.load(file)["traceEvents"])


def forwards(path: str) -> int:
    """Of the thread that computes: one thread's, with operators of torch beside them."""
    marks = [event for event in events(path) if event.get("name") == "encoder_forward" and event.get("ph") == "X"]
    threads = {event["tid"] for event in marks}
    assert len(threads) <= 1
    if marks:
        assert any(e.get("cat") == "cpu_op" and e["tid"] in threads and "aten::" in e["name"] for e in events(path))
    return len(marks)


def encode(world: World, first: int, count: int = 8) -> None:
    """Enough one after another that both replicas have some."""
    for seed in range(first, first + count):
        world.encode([noise_png(seed, 56, 56)])


def test_every_rank_writes_a_trace(world: World, folder: Path) -> None:
    planned = start(world, profile_prefix="run", activities=["CPU", "MEM"], record_shapes=True)
    assert start(world, status=400) == [ALREADY] * 4
    encode(world, 0)
    written = stop(world)
    assert written == planned
    for (rank, dp, tp), path in zip(RANKS, written, strict=True):
        assert re.fullmatch(rf"run-[0-9a-f-]+-rank{rank}-dp{dp}-tp{tp}\.trace\.json\.gz", Path(path).name)
    counts = [forwards(path) for path in written]
    assert sum(counts[::2]) >= 8 and counts[0] == counts[1] > 0 and counts[2] == counts[3] > 0
    assert stop(world, status=400) == [NOT_RUNNING] * 4
    assert sorted(folder.iterdir()) == sorted(map(Path, written)), "nothing half-written is left"


def test_a_recording_of_so_many_forwards_ends_by_itself(world: World) -> None:
    planned = start(world, num_steps=2, output_dir="two/steps")
    encode(world, 100)
    for path in planned:
        world.wait_for("a trace", Path(path).exists)
        assert forwards(path) == 2
    assert stop(world) == planned
    assert stop(world, status=400) == [NOT_RUNNING] * 4


def test_with_stacks_while_it_encodes(world: World) -> None:
    start(world, with_stack=True)
    encode(world, 200)
    for path in stop(world):
        assert any("worker.py" in event.get("name", "") for event in events(path))


def test_one_rank_that_cannot_write_is_named_and_lives(world: World) -> None:
    planned = start(world)
    Path(planned[3]).mkdir()
    encode(world, 300)
    answers = stop(world, status=500)
    assert answers[:3] == planned[:3]
    assert answers[3].startswith("failed: IsADirectoryError")
    assert all(forwards(path) >= 1 for path in planned[:3])
    encode(world, 400, count=4)
    assert [world.epoch(replica) for replica in (0, 1)] == [0, 0]


def test_what_no_rank_can_do_is_refused_by_each(world: World, folder: Path) -> None:
    for outside in ("/tmp/elsewhere", "../elsewhere"):
        assert (
            start(world, status=400, output_dir=outside)
            == [f"failed: output_dir must be inside --profile-dir {folder}"] * 4
        )
    (folder / "file").write_text("")
    assert all("failed: " in line for line in start(world, status=500, output_dir="file"))
    assert start(world, status=400, activities=["GPU"]) == ["failed: activity GPU: this rank runs on cpu"] * 4
    encode(world, 500, count=4)
    assert stop(world, status=400) == [NOT_RUNNING] * 4
    assert [world.epoch(replica) for replica in (0, 1)] == [0, 0]


def test_a_replica_that_is_lost_while_it_records(world: World) -> None:
    planned = start(world)
    os.kill(world.pid("worker", 3), signal.SIGKILL)
    world.wait_for("a new epoch", lambda: world.epoch(1) == 1)
    world.wait_ready(replicas=2)
    assert stop(world, status=400) == [*planned[:2], NOT_RUNNING, NOT_RUNNING]
    encode(world, 600, count=4)
