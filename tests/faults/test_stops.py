"""Processes that are stopped, not dead: their connections stay open, and nothing but silence tells."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.harness.reference import QwenReference
from tests.harness.world import World, noise_png, off_by

PICTURE = noise_png(1, 84, 70)
PAUSE_S = 11.0
"""Longer than a keeper may be silent, which is three times `--stall-timeout-s`."""


def test_a_stopped_nursery_is_replaced_and_its_node_heals(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), nproc=2) as world:
        world.start().wait_ready(replicas=2)
        old = world.pid("nursery")
        os.kill(old, signal.SIGSTOP)
        os.kill(world.pid("worker", 1), signal.SIGKILL)
        assert len(world.encode([PICTURE])) == 1, "the other replica serves on"
        world.wait_for("a new nursery", lambda: world.pid("nursery") != old)
        world.wait_for("healing", lambda: world.epoch(1) >= 1 and world.info()["ready"]["replicas_ready"] == 2)
        assert f"the nursery (pid {old}) does not answer" in world.log()
        want = QwenReference(qwen_tiny).tokens(PICTURE)
        assert all(off_by(got, want) <= 1e-6 for got in world.encode([PICTURE] * 4))


def test_a_stopped_keeper_costs_its_replica_until_it_goes_on(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), "--stall-timeout-s", "3", nproc=2) as world:
        world.start().wait_ready(replicas=2)
        keeper = world.pid("keeper", 1)
        os.kill(keeper, signal.SIGSTOP)
        try:
            world.wait_for("its loss", lambda: world.info()["replicas"][1]["state"] == "failed")
            reply = world.post([PICTURE] * 3)
            assert (reply.status_code, reply.headers["x-spmd-replica"]) == (200, "0")
        finally:
            os.kill(keeper, signal.SIGCONT)
        world.wait_for("its return", lambda: world.info()["ready"]["replicas_ready"] == 2)
        assert world.epoch(1) >= 1
        assert world.epoch(0) == 0


def test_a_stopped_dispatcher_blames_nobody_when_it_goes_on(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), "--stall-timeout-s", "3", nproc=2) as world:
        world.start().wait_ready(replicas=2)
        keeper = world.pid("keeper", 0)
        os.kill(keeper, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(keeper, signal.SIGCONT)
        assert len(world.encode([PICTURE] * 4)) == 4
        assert "this process stood still" in world.log()
        assert [world.epoch(0), world.epoch(1)] == [0, 0]


def decoders(world: World) -> list[int]:
    return [process["pid"] for process in world.info()["processes"] if process["role"] == "preparer"]


def test_a_decoder_that_stops_while_nobody_asks_is_found_by_a_probe(qwen_tiny: Path) -> None:
    """So that the first caller after a quiet hour does not find it."""
    flags = ("--probe-interval-s", "1", "--preprocess-timeout-s", "2")
    with World("--model-path", str(qwen_tiny), *flags) as world:
        world.start().wait_ready()
        world.wait_for("word of its decoder", lambda: decoders(world))
        old = world.pid("preparer")
        os.kill(old, signal.SIGSTOP)
        world.wait_for("a new one", lambda: [p for p in decoders(world) if p != old] == decoders(world) != [])
        assert len(world.encode([PICTURE])) == 1
        assert world.epoch(0) == 0, "the replica is sound"
        counted = 'spmd_encoder_items_total{outcome="ok"} 1.0'
        assert counted in world.http.get("/metrics").text, "probes are nobody's items"


def test_a_world_of_one_survives_its_store(qwen_tiny: Path) -> None:
    """Where no torchrun agent hosts it; a replica is formed anew through the new one."""
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.start().wait_ready()
        store = next(seen.pid for seen in world.seen if seen.name.startswith("spmd_encoder store"))
        os.kill(store, signal.SIGKILL)
        world.wait_for("a new store", lambda: "the rendezvous store ended with code -9" in world.log())
        os.kill(world.pid("worker"), signal.SIGKILL)
        world.wait_for("healing", lambda: world.epoch(0) == 1 and world.info()["ready"]["replicas_ready"] == 1)
        assert len(world.encode([PICTURE])) == 1
        world.note_processes()
        world.terminate()
        assert world.wait_end() == [0]
        world.assert_nothing_left()


def test_a_frozen_world_blames_nobody_when_it_goes_on(qwen_tiny: Path) -> None:
    """All processes at once, as a container that is paused or a machine that is suspended."""
    with World("--model-path", str(qwen_tiny), "--stall-timeout-s", "3", nproc=3) as world:
        world.start().wait_ready(replicas=3)
        world.note_processes()
        alive = [seen.pid for seen in world.seen if seen.alive() and seen.pid != world.launcher.pid]
        for sig, pause_s in ((signal.SIGSTOP, PAUSE_S), (signal.SIGCONT, 0.0)):
            for pid in alive:
                os.kill(pid, sig)
            time.sleep(pause_s)
        assert len(world.encode([noise_png(n, 60, 60) for n in range(6)])) == 6
        time.sleep(3.0)
        assert [world.epoch(replica) for replica in range(3)] == [0, 0, 0], world.log()[-3000:]


def test_a_worker_that_is_stopped_before_the_world_is_formed_is_replaced(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), "--load-timeout-s", "15", nproc=2) as world:
        world.start()
        os.kill(world.wait_for("a worker", lambda: world.find("worker rank=1")), signal.SIGSTOP)
        world.wait_ready(replicas=2)
        assert "the worker gave no sign of life for 15 s" in world.log()
