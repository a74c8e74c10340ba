"""Drills on a (2, 2) world: a worker falls, a poison is sent, the world is told to end; what must hold in each."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.load import Load
from tests.harness.reference import QwenReference
from tests.harness.world import World, noise_png, off_by, vector

Expected = list[np.ndarray[Any, Any]]


def drill_pictures() -> list[bytes]:
    return [noise_png(i, 56 + 14 * i, 84) for i in range(6)]


def answers_to(folder: Path, pictures: Sequence[bytes]) -> Expected:
    reference = QwenReference(folder)
    return [reference.tokens(picture) for picture in pictures]


@contextmanager
def drill_world(folder: Path, faults: Mapping[bytes, str], worker_start: str) -> Iterator[World]:
    """`faults`: what each picture does to whoever works on it (`worker.faults`)."""
    text = ",".join(f"{action}@sha256:{hashlib.sha256(picture).hexdigest()}" for picture, action in faults.items())
    flags = (
        *("--model-path", str(folder), "--tp-size", "2", "--worker-start", worker_start),
        # Spawned workers import for seconds, and keep the cores from those that run.
        *("--stall-timeout-s", "6" if worker_start == "fork" else "10"),
        *("--batch-timeout-s", "6", "--preprocess-timeout-s", "3"),
        *("--cache-bytes", "0"),  # every answer is to go through the tower
    )
    with World(*flags, nproc=4, env={"SPMD_ENCODER_FAULTS": text}) as world:
        yield world.start().wait_ready(replicas=2)


def epochs(world: World) -> list[int]:
    return [replica["epoch"] for replica in world.info()["replicas"]]


def wait_healed(world: World, least: Sequence[int]) -> None:
    def healed() -> bool:
        replicas = world.info()["replicas"]
        return all(r["state"] == "ready" and r["epoch"] >= e for r, e in zip(replicas, least, strict=True))

    world.wait_for(f"epochs {least}", healed)


def worker_falls(world: World, pictures: list[bytes], expected: Expected, rank: int, sig: int) -> None:
    """Its replica is back by itself, the other goes on, and no client gets an error."""
    replica = rank // 2
    before = epochs(world)
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
    assert epochs(world) == after, f"the other replica must not be touched, this one once:\n{world.log()[-4000:]}"


def poison_is_sent(world: World, pictures: list[bytes], expected: Expected, poison: bytes) -> None:
    """Two deaths at most, an error for it alone, its mates get their embeddings; then it is refused."""
    before = sum(epochs(world))
    reply = world.post([pictures[0], poison, pictures[1]])
    assert reply.status_code == 200, reply.text[:300]
    first, bad, last = reply.json()["data"]
    assert (first["status"], last["status"]) == ("ok", "ok"), reply.text[:600]
    assert off_by(vector(first), expected[0]) <= 1e-5
    assert off_by(vector(last), expected[1]) <= 1e-5
    assert bad["error"]["code"] == "WORKER_DIED"
    again = world.post([poison])
    assert again.status_code == 500
    assert again.json()["error"]["code"] == "WORKER_DIED"
    world.wait_for("healing", lambda: world.info()["ready"]["replicas_ready"] == 2)
    assert sum(epochs(world)) - before <= 2


def signals_to_workers(world: World, pictures: list[bytes]) -> None:
    """SIGTERM and SIGINT reach workers too when a whole process group is signalled: only keepers end them."""
    before = epochs(world)
    for rank in range(4):
        for sig in (signal.SIGTERM, signal.SIGINT):
            os.kill(world.pid("worker", rank), sig)
    assert len(world.encode(pictures)) == len(pictures)
    assert epochs(world) == before


def drained_under_load(world: World, pictures: list[bytes], expected: Expected) -> None:
    """What was accepted is answered, every rank ends with 0, nothing is left. It ends the world."""
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
