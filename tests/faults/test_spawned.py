"""The drills of `test_kills.py` that hang on how workers start, with spawned ones, which import for seconds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import drills
from tests.harness.drills import Expected
from tests.harness.world import World, noise_png

KILLER = noise_png(900, 84, 84)


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return drills.drill_pictures()


@pytest.fixture(scope="module")
def expected(qwen_tiny: Path, pictures: list[bytes]) -> Expected:
    return drills.answers_to(qwen_tiny, pictures)


@pytest.fixture(scope="module")
def world(qwen_tiny: Path) -> Iterator[World]:
    with drills.drill_world(qwen_tiny, {KILLER: "kill"}, "spawn") as world:
        yield world


def test_there_is_no_nursery(world: World) -> None:
    roles = {"keeper", "worker", "preparer"}
    world.wait_for("all roles", lambda: {process["role"] for process in world.info()["processes"]} == roles)


@pytest.mark.parametrize(("rank", "sig"), [(0, signal.SIGKILL), (3, signal.SIGSTOP)], ids=["leader", "follower"])
def test_a_worker_falls(world: World, pictures: list[bytes], expected: Expected, rank: int, sig: int) -> None:
    drills.worker_falls(world, pictures, expected, rank, sig)


def test_a_poison_input(world: World, pictures: list[bytes], expected: Expected) -> None:
    drills.poison_is_sent(world, pictures, expected, KILLER)


def test_signals_to_workers(world: World, pictures: list[bytes]) -> None:
    drills.signals_to_workers(world, pictures)


def test_sigterm_under_load(world: World, pictures: list[bytes], expected: Expected) -> None:
    drills.drained_under_load(world, pictures, expected)
