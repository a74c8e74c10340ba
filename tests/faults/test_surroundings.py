"""Odd surroundings: few descriptors, chatty imports, closed streams, long names, neighbours, terminals that go away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.harness.world import World, free_port, noise_png

PICTURE = noise_png(1, 84, 70)


def test_idle_clients_cannot_take_the_servers_own_descriptors(qwen_tiny: Path) -> None:
    """Twice as many connections as it may have descriptors; then a worker dies, and it has to heal."""
    with World("--model-path", str(qwen_tiny), torchrun=False) as world, ExitStack() as idle:
        world.commands[0] = ["bash", "-c", 'ulimit -n 600; exec "$@"', "-", *world.commands[0]]
        world.start().wait_ready()
        refused = 0
        for _ in range(1200):
            client = idle.enter_context(socket.socket())
            client.settimeout(1.0)
            try:
                client.connect(("127.0.0.1", world.port))
            except OSError:
                refused += 1
        time.sleep(3.0)
        os.kill(world.find("worker rank=0") or 0, signal.SIGKILL)
        idle.close()
        world.wait_for("healing", lambda: world.epoch(0) == 1 and world.info()["ready"]["replicas_ready"] == 1)
        assert len(world.encode([PICTURE])) == 1
        assert world.log().count("Traceback") == 0, world.log()[-3000:]


def test_what_imports_print_is_no_answer(qwen_tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello from the site')\n")
    with World("--model-path", str(qwen_tiny), torchrun=False, env={"PYTHONPATH": str(tmp_path)}) as world:
        world.start().wait_ready()
        assert len(world.encode([PICTURE])) == 1


def test_closed_streams(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.commands[0] = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *world.commands[0]]
        world.start().wait_ready()
        assert len(world.encode([PICTURE])) == 1
        world.terminate()
        assert world.wait_end() == [0]
        world.assert_nothing_left()


def test_a_temporary_folder_with_a_long_name_is_one_sentence(qwen_tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "spmd_encoder", "--model-path", str(qwen_tiny), "--port", str(free_port())],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "set TMPDIR to a shorter one" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("torchrun", [True, False])
def test_a_terminal_that_goes_away_drains(qwen_tiny: Path, torchrun: bool) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=torchrun) as world:
        # As a shell starts it: the tests themselves may run under nohup.
        world.commands[0] = ["env", "--default-signal=HUP", *world.commands[0]]
        world.start().wait_ready()
        os.killpg(world.launcher.pid, signal.SIGHUP)
        world.wait_end()
        assert world.exit_codes() == {0: 0}, world.log()[-3000:]
        world.assert_nothing_left()


def test_nohup(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.commands[0] = ["nohup", *world.commands[0]]
        world.start().wait_ready()
        os.killpg(world.launcher.pid, signal.SIGHUP)
        time.sleep(1.0)
        assert len(world.encode([PICTURE])) == 1


@pytest.mark.parametrize("after_s", [0.1, 0.4, 0.8])
def test_a_launcher_that_is_killed_as_it_starts_leaves_nobody(qwen_tiny: Path, after_s: float) -> None:
    with World("--model-path", str(qwen_tiny), nproc=2) as world:
        world.start()
        world.wait_for("a rank", lambda: psutil.Process(world.launcher.pid).children())
        time.sleep(after_s)
        world.note_processes()
        world.launcher.kill()
        world.assert_nothing_left()


def test_the_loss_of_the_elected_nodes_launcher_is_no_drain(qwen_tiny: Path) -> None:
    """The other node's launcher must not report success."""
    with World("--model-path", str(qwen_tiny), nproc=1, agents=2) as world:
        world.start().wait_ready(replicas=2)
        elected = psutil.Process(world.pid("keeper", 0)).parent()
        assert elected is not None
        killed, other = sorted(world.launchers, key=lambda launcher: launcher.pid != elected.pid)
        killed.kill()
        assert other.wait(60) != 0
        assert world.exit_codes()[0] == 4


def test_two_worlds_of_one_parent_without_torchrun(qwen_tiny: Path) -> None:
    """They share the launcher's pid and the temporary folder, and must not share more."""
    with ExitStack() as stack:
        worlds = [
            stack.enter_context(World("--model-path", str(qwen_tiny), "--tp-size", "2", torchrun=False))
            for _ in range(2)
        ]
        for world in worlds:
            world.env["TMPDIR"] = str(worlds[0].tmp)
            world.env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            world.env["MASTER_PORT"] = str(free_port())
            (command,) = world.commands
            world.commands = [["env", f"RANK={rank}", f"LOCAL_RANK={rank}", *command] for rank in range(2)]
            world.start()
        first, second = (world.wait_ready() for world in worlds)
        os.kill(first.pid("worker", 1), signal.SIGKILL)
        first.wait_for("healing", lambda: first.epoch(0) == 1 and first.info()["ready"]["replicas_ready"] == 1)
        assert len(first.encode([PICTURE])) == 1
        first.terminate()
        assert first.wait_end() == [0, 0]
        assert len(second.encode([PICTURE])) == 1
        assert second.epoch(0) == 0
