"""Real signals to every kind of process of a (2, 2) world under load: clients see a slower answer and no error."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.harness import drills
from tests.harness.drills import Expected, epochs
from tests.harness.load import Load
from tests.harness.world import World, noise_png, off_by, vector

KILLER, RAISER, HANGER, DECODE_KILLER, DECODE_HANGER, FLOOD = (noise_png(900 + i, 84, 84) for i in range(6))
FAULTS = {
    KILLER: "kill",
    RAISER: "raise",
    HANGER: "hang",
    DECODE_KILLER: "decode-kill",
    DECODE_HANGER: "decode-hang",
    FLOOD: "kill",
}


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return drills.drill_pictures()


@pytest.fixture(scope="module")
def expected(qwen_tiny: Path, pictures: list[bytes]) -> Expected:
    return drills.answers_to(qwen_tiny, pictures)


@pytest.fixture(scope="module")
def world(qwen_tiny: Path) -> Iterator[World]:
    with drills.drill_world(qwen_tiny, FAULTS, "fork") as world:
        yield world


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
@pytest.mark.parametrize("rank", [0, 3], ids=["leader", "follower"])
def test_a_worker_falls_and_no_client_notices(
    world: World, pictures: list[bytes], expected: Expected, rank: int, sig: int
) -> None:
    drills.worker_falls(world, pictures, expected, rank, sig)


def test_files_that_were_removed_from_the_temporary_folder_keep_no_replica_from_healing(
    world: World, pictures: list[bytes], expected: Expected
) -> None:
    """As programs do it to old ones."""
    pages = list(world.tmp.glob("*/tower-*"))
    assert len(pages) == 4
    for page in pages:
        page.unlink()
    drills.worker_falls(world, pictures, expected, 0, signal.SIGKILL)


@pytest.mark.parametrize("poison", [KILLER, RAISER, HANGER], ids=["kill", "raise", "hang"])
def test_a_poison_input_costs_at_most_two_deaths(
    world: World, pictures: list[bytes], expected: Expected, poison: bytes
) -> None:
    drills.poison_is_sent(world, pictures, expected, poison)
    if poison is RAISER:
        assert "the worker ends: RuntimeError: injected fault" in world.log(), "what was raised, and where"
        assert "unhandled errors in a TaskGroup" not in world.log()


def test_a_poison_sent_many_times_at_once_costs_two_deaths(world: World, pictures: list[bytes]) -> None:
    before = sum(epochs(world))
    with ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(lambda _: world.post([FLOOD, pictures[0]]), range(8)))
    for reply in replies:
        poison, mate = reply.json()["data"]
        assert (poison["error"]["code"], mate["status"]) == ("WORKER_DIED", "ok"), reply.text[:300]
    world.wait_for("healing", lambda: world.info()["ready"]["replicas_ready"] == 2)
    assert sum(epochs(world)) - before <= 2


@pytest.mark.parametrize(
    ("picture", "code", "status"),
    # What stands still, and has no processor, is not the picture's fault.
    [(DECODE_KILLER, "MEDIA_CORRUPT", 422), (DECODE_HANGER, "OVERLOADED", 503)],
    ids=["kill", "hang"],
)
def test_a_picture_that_ends_its_decoder_costs_itself_alone(
    world: World, pictures: list[bytes], expected: Expected, picture: bytes, code: str, status: int
) -> None:
    before = epochs(world)
    for _ in range(2):
        first, poison, last = world.post([pictures[0], picture, pictures[1]]).json()["data"]
        assert off_by(vector(first), expected[0]) <= 1e-5
        assert off_by(vector(last), expected[1]) <= 1e-5
        assert poison["error"]["code"] == code
    assert world.post([picture]).status_code == status
    assert epochs(world) == before


def test_a_killed_preparer_is_not_noticed(world: World, pictures: list[bytes], expected: Expected) -> None:
    def preparers() -> set[int]:
        return {process["pid"] for process in world.info()["processes"] if process["role"] == "preparer"}

    world.wait_for("two living", lambda: len([pid for pid in preparers() if psutil.pid_exists(pid)]) == 2)
    before, unchanged = preparers(), epochs(world)
    with Load(world, pictures, expected) as load:
        world.wait_for("load", lambda: len(load.answers) > 20)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        world.wait_for("new ones", lambda: len(preparers() - before) == 2)
        enough = len(load.answers) + 20
        world.wait_for("load after", lambda: len(load.answers) > enough)
    assert not load.wrong(), load.wrong()[:3]
    assert epochs(world) == unchanged


def test_workers_end_by_their_keepers_word_alone(world: World, pictures: list[bytes]) -> None:
    drills.signals_to_workers(world, pictures)


def test_the_nursery_falls(world: World, pictures: list[bytes], expected: Expected) -> None:
    before, old = epochs(world), world.pid("nursery")
    with Load(world, pictures, expected, clients=3) as load:
        world.wait_for("load", lambda: len(load.answers) > 10)
        os.kill(old, signal.SIGKILL)
        drills.wait_healed(world, [epoch + 1 for epoch in before])
        enough = len(load.answers) + 10
        world.wait_for("load after", lambda: len(load.answers) > enough)
    assert not load.wrong(), load.wrong()[:3]
    assert world.pid("nursery") != old


def test_stacks_on_sigusr1(world: World) -> None:
    for role in ("keeper", "worker"):
        os.kill(world.pid(role, 1), signal.SIGUSR1)
    world.wait_for("stacks", lambda: world.log().count("Current thread") >= 2)


def test_sigterm_under_load_finishes_what_was_accepted(world: World, pictures: list[bytes], expected: Expected) -> None:
    """The last test of the module: it ends the world."""
    drills.drained_under_load(world, pictures, expected)
