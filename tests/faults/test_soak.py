"""A short soak: requests through each way of embeddings to their receiver, many of whose clients go away in the middle.

`python -m benchmarks.soak` is the long one, which also measures whether memory grows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from benchmarks.soak import Plan, processes_of, run, soak_world
from benchmarks.soak_traffic import BACKENDS, HUNG_UP, OK, Backend, Target
from tests.harness.world import World

pytestmark = pytest.mark.timeout(280)

PLAN = Plan(requests=300, clients=8, hang_ups=0.2)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[World, Target]]:
    """The world that has the flags of its parameter, for all tests with these."""
    with soak_world(*request.param, "--cache-bytes", "65536") as (world, target):
        yield world, target


@pytest.mark.parametrize(
    ("served", "backend"),
    [pytest.param(backend.flags, backend, id=backend.name) for backend in BACKENDS],
    indirect=["served"],
    scope="module",
)
def test_every_request_has_one_outcome_and_nothing_is_left(served: tuple[World, Target], backend: Backend) -> None:
    world, target = served
    before, epochs = open_files(world), [replica["epoch"] for replica in world.info()["replicas"]]
    target.arrived.clear()
    report = asyncio.run(run(backend, world, target, PLAN))
    outcomes = report["outcomes"]
    assert outcomes.keys() == {OK, HUNG_UP}, outcomes
    assert sum(outcomes.values()) == PLAN.requests
    assert report["pending"] == {}
    assert report["pushed_twice"] == 0
    assert report["epochs"] == epochs, f"clients that hang up cost no replica\n{world.log()[-6000:]}"
    # Connections to receivers that live are kept for a while: they may be used again.
    kept = {"keeper rank=0 dp=0 tp=0": 2 * PLAN.clients} if backend.pushes else {}
    end = time.monotonic() + 20
    while (now := open_files(world)) and time.monotonic() < end:
        if all(now[name] <= before[name] + kept.get(name, 0) for name in before):
            break
        time.sleep(0.1)
    assert {name: now[name] - before[name] for name in before if now[name] > before[name] + kept.get(name, 0)} == {}
    assert "Traceback" not in world.log(), world.log()[-4000:]


def open_files(world: World) -> dict[str, int]:
    return {name: process.num_fds() for name, process in processes_of(world).items()}
