"""Real signals to every kind of process of a (2, 2) world under load: clients see a slower answer and no error."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.harness.load import Load
from tests.harness.reference import QwenReference
from tests.harness.world import World, noise_png, off_by, vector

KILLER, RAISER, HANGER, DECODE_KILLER, DECODE_HANGER, FLOOD = (noise_png(900 + i, 84, 84) for i in range(6))


def digest(picture: bytes) -> str:
    return "sha256:" + hashlib.sha256(picture).hexdigest()


FAULTS = ",".join(
    f"{action}@{digest(picture)}"
    for action, picture in (
        ("kill", KILLER),
        ("raise", RAISER),
        ("hang", HANGER),
        ("decode-kill", DECODE_KILLER),
        ("decode-hang", DECODE_HANGER),
        ("kill", FLOOD),
    )
)


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [noise_png(i, 56 + 14 * i, 84) for i in range(6)]


@pytest.fixture(scope="module")
def expected(qwen_tiny: Path, pictures: list[bytes]) -> list[np.ndarray[Any, Any]]:
    reference = QwenReference(qwen_tiny)
    return [reference.tokens(picture) for picture in pictures]


@pytest.fixture(scope="module", params=["fork", "spawn"])
def world(request: pytest.FixtureRequest, qwen_tiny: Path) -> Iterator[World]:
    flags = (
        *("--model-path", str(qwen_tiny), "--tp-size", "2", "--worker-start", request.param),
        *("--stall-timeout-s", "4", "--batch-timeout-s", "6", "--preprocess-timeout-s", "3"),
    )
    with World(*flags, nproc=4, env={"SPMD_ENCODER_FAULTS": FAULTS}) as world:
        yield world.start().wait_ready(replicas=2)


def healed(world: World, replica: int, epoch: int) -> bool:
    info = world.info()["replicas"][replica]
    return bool(info["epoch"] >= epoch and info["state"] == "ready")


def wait_healed(world: World, epochs: list[int]) -> None:
    def all_healed() -> bool:
        return all(healed(world, replica, epoch) for replica, epoch in enumerate(epochs))

    world.wait_for(f"epochs {epochs}", all_healed, 60)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
@pytest.mark.parametrize("rank", [0, 3], ids=["leader", "follower"])
def test_a_worker_falls_and_no_client_notices(
    world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]], rank: int, sig: int
) -> None:
    replica = rank // 2
    before = [world.epoch(0), world.epoch(1)]
    with Load(world, pictures, expected) as load:
        world.wait_for("load", lambda: len(load.answers) > 20)
        fell = time.monotonic()
        os.kill(world.pid("worker", rank), sig)
        after = list(before)
        after[replica] += 1
        wait_healed(world, after)
        back = time.monotonic()
        enough = len(load.answers) + 20
        world.wait_for("load after", lambda: len(load.answers) > enough)
    assert not load.wrong(), load.wrong()[:3]
    other = str(1 - replica)
    answered = [a for a in load.answers if a.replica == other and fell <= a.ended <= back]
    assert answered or back - fell < 0.5, "the other replica must go on answering"
    assert [world.epoch(0), world.epoch(1)] == after, "the other replica must not be touched"


@pytest.mark.parametrize(
    ("picture", "what"),
    [(KILLER, "kill"), (RAISER, "raise"), (HANGER, "hang")],
    ids=["kill", "raise", "hang"],
)
def test_a_poison_input_costs_at_most_two_deaths(
    world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]], picture: bytes, what: str
) -> None:
    epochs = sum(world.epoch(replica) for replica in (0, 1))
    reply = world.post([pictures[0], picture, pictures[1]])
    assert reply.status_code == 200, reply.text[:300]
    first, poison, last = reply.json()["data"]
    assert (first["status"], last["status"]) == ("ok", "ok"), reply.text[:600]
    assert off_by(vector(first), expected[0]) <= 1e-5
    assert off_by(vector(last), expected[1]) <= 1e-5
    assert poison["error"]["code"] == "WORKER_DIED"
    # Alone, and again: refused without another death, as an error of the server.
    again = world.post([picture])
    assert again.status_code == 500
    assert again.json()["error"]["code"] == "WORKER_DIED"
    world.wait_for("healing", lambda: world.info()["ready"]["replicas_ready"] == 2)
    assert sum(world.epoch(replica) for replica in (0, 1)) - epochs <= 2


@pytest.mark.parametrize("picture", [DECODE_KILLER, DECODE_HANGER], ids=["kill", "hang"])
def test_a_picture_that_ends_its_decoder_costs_itself_alone(
    world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]], picture: bytes
) -> None:
    before = [world.epoch(0), world.epoch(1)]
    for _ in range(2):
        first, poison, last = world.post([pictures[0], picture, pictures[1]]).json()["data"]
        assert off_by(vector(first), expected[0]) <= 1e-5
        assert off_by(vector(last), expected[1]) <= 1e-5
        assert poison["error"]["code"] == "MEDIA_CORRUPT"
    assert world.post([picture]).status_code == 422
    assert [world.epoch(0), world.epoch(1)] == before


def test_a_killed_preparer_is_not_noticed(
    world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]]
) -> None:
    def preparers() -> set[int]:
        return {process["pid"] for process in world.info()["processes"] if process["role"] == "preparer"}

    world.wait_for("two living", lambda: len([pid for pid in preparers() if psutil.pid_exists(pid)]) == 2)
    before, epochs = preparers(), [world.epoch(0), world.epoch(1)]
    with Load(world, pictures, expected) as load:
        world.wait_for("load", lambda: len(load.answers) > 20)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        world.wait_for("new ones", lambda: len(preparers() - before) == 2)
        enough = len(load.answers) + 20
        world.wait_for("load after", lambda: len(load.answers) > enough)
    assert not load.wrong(), load.wrong()[:3]
    assert [world.epoch(0), world.epoch(1)] == epochs


def test_a_poison_sent_many_times_at_once_costs_two_deaths(world: World, pictures: list[bytes]) -> None:
    epochs = sum(world.epoch(replica) for replica in (0, 1))
    with ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(lambda _: world.post([FLOOD, pictures[0]]), range(8)))
    for reply in replies:
        poison, mate = reply.json()["data"]
        assert (poison["error"]["code"], mate["status"]) == ("WORKER_DIED", "ok"), reply.text[:300]
    world.wait_for("healing", lambda: world.info()["ready"]["replicas_ready"] == 2)
    assert sum(world.epoch(replica) for replica in (0, 1)) - epochs <= 2


def test_workers_end_by_their_keepers_word_alone(world: World, pictures: list[bytes]) -> None:
    """SIGTERM and SIGINT reach workers too when a whole process group is signalled."""
    before = [world.epoch(0), world.epoch(1)]
    for rank in range(4):
        for sig in (signal.SIGTERM, signal.SIGINT):
            os.kill(world.pid("worker", rank), sig)
    assert len(world.encode(pictures)) == len(pictures)
    assert [world.epoch(0), world.epoch(1)] == before


def test_the_nursery_falls(world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]]) -> None:
    if not [p for p in world.info()["processes"] if p["role"] == "nursery"]:
        pytest.skip("spawned workers have no nursery")
    before = [world.epoch(0), world.epoch(1)]
    old = world.pid("nursery")
    with Load(world, pictures, expected, clients=3) as load:
        world.wait_for("load", lambda: len(load.answers) > 10)
        os.kill(old, signal.SIGKILL)
        wait_healed(world, [epoch + 1 for epoch in before])
        enough = len(load.answers) + 10
        world.wait_for("load after", lambda: len(load.answers) > enough)
    assert not load.wrong(), load.wrong()[:3]
    assert world.pid("nursery") != old


def test_stacks_on_sigusr1(world: World) -> None:
    for role in ("keeper", "worker"):
        os.kill(world.pid(role, 1), signal.SIGUSR1)
    world.wait_for("stacks", lambda: world.log().count("Current thread") >= 2)


def test_sigterm_under_load_finishes_what_was_accepted(
    world: World, pictures: list[bytes], expected: list[np.ndarray[Any, Any]]
) -> None:
    """The last test of the module: it ends the world."""
    world.note_processes()
    with Load(world, pictures, expected) as load:
        world.wait_for("load", lambda: len(load.answers) > 20)
        # To the whole process group, as scancel and systemd do: torchrun and, by it, the keepers are told.
        os.killpg(world.launcher.pid, signal.SIGTERM)
        asked = time.monotonic()
        world.wait_end()
        load.stop()
    # Asked before the signal: answered, or refused in so many words where it was not yet accepted.
    early = [a.wrong for a in load.answers if a.began < asked and a.wrong and "DRAINING" not in a.wrong]
    assert not early, early[:3]
    late = [a.wrong for a in load.answers if a.wrong and "DRAINING" not in a.wrong]
    assert all("Error" in wrong for wrong in late), late[:3]
    assert world.exit_codes() == dict.fromkeys(range(4), 0), world.log()[-3000:]
    world.assert_nothing_left()
