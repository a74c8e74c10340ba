"""Starts that must fail well, restarts that must recover, and ends that must leave nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.reference import QwenReference
from tests.harness.world import World, data_uri, free_port, noise_png, off_by

PICTURE = noise_png(1, 84, 70)


def run_alone(
    *flags: str, env: dict[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spmd_encoder", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **(env or {})}, check=False
    )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# -- starts that must fail


def test_an_unknown_flag_is_one_sentence() -> None:
    done = run_alone("--modle-path", "x")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "--modle-path" in done.stderr


def test_check_prints_the_configuration_and_loads_nothing() -> None:
    done = run_alone("--check", "--tp", "1", env={"SPMD_ENCODER_PORT": "4567"})
    assert done.returncode == 0
    assert json.loads(done.stdout)["port"] == 4567
    assert done.stderr == ""


def test_check_tells_of_a_drain_that_torchrun_cuts_off() -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "abc"}
    done = run_alone("--check", "--drain-deadline-s", "100", env=torchrun)
    assert done.returncode == 0 and json.loads(done.stdout)["drain_deadline_s"] == 100
    assert "torchrun kills its ranks 30 s after a signal" in last_line(done.stderr)


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--tp-size", "2"], "does not divide"), (["--dp-size", "3"], "--dp-size 3"), (["--port", "-1"], "--port")],
)
def test_sizes_that_do_not_fit(flags: list[str], said: str) -> None:
    done = run_alone(*flags)
    assert done.returncode == 2
    assert said in last_line(done.stderr)


def test_a_taken_port_ends_the_start_at_once(qwen_tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_alone("--port", str(port), "--model-path", str(qwen_tiny))
    assert done.returncode == 3
    assert f"127.0.0.1:{port} is taken" in last_line(done.stderr)
    assert "nursery" not in done.stderr, "nothing is loaded before the port is there"


def test_torchrun_reports_the_sentence_as_root_cause(qwen_tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with World("--model-path", str(qwen_tiny), nproc=2) as world:
            world.commands[0][world.commands[0].index("--port") + 1] = str(taken.getsockname()[1])
            world.start()
            assert world.wait_end() == [1]
            assert "Root Cause" in world.log()
            assert "choose another --port" in world.log()


def test_an_unsupported_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with World("--model-path", str(tmp_path), nproc=2, torchrun_flags=()) as world:
        world.start()
        world.wait_end()
        assert "'llama' is not supported" in world.log() and "qwen2_5_vl" in world.log()
        assert 1 in _sentences(world)


def _sentences(world: World) -> set[int]:
    """Exit codes that torchrun reports of its ranks."""
    return {int(line.split(":")[1].split("(")[0]) for line in world.log().splitlines() if "exitcode  :" in line}


def test_ranks_that_disagree_say_so(qwen_tiny: Path, tmp_path: Path) -> None:
    """Rank 1 gets another --max-batch-items from its environment."""
    script = tmp_path / "start.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['RANK'] == '1': os.environ['SPMD_ENCODER_MAX_BATCH_ITEMS'] = '3'\n"
        "sys.argv[0] = 'spmd_encoder'\n"
        "runpy.run_module('spmd_encoder', run_name='__main__')\n"
    )
    with World("--model-path", str(qwen_tiny), nproc=2) as world:
        command = world.commands[0]
        at = command.index("spmd_encoder")
        world.commands[0] = [*command[: at - 1], str(script), *command[at + 1 :]]
        world.start()
        world.wait_end()
        said = "the ranks disagree on --max-batch-items: rank 0 has 8, rank 1 has 3"
        assert said in world.log(), world.log()[-3000:]


def test_a_model_that_cannot_load_ends_the_world_with_its_reason(qwen_tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(qwen_tiny, broken)
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with World("--model-path", str(broken), nproc=2) as world:
        world.start()
        world.wait_end()
        assert shard.name in world.log()
        assert set(world.exit_codes().values()) <= {1}
        world.assert_nothing_left()


# -- what the port says while the world starts


def test_live_at_once_ready_later(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        began = time.monotonic()
        world.start()
        world.wait_for("live", lambda: world.http.get("/health/live").status_code == 200)
        live_s = time.monotonic() - began
        early = world.http.get("/health/ready")
        refused = world.post([PICTURE])
        world.wait_ready()
        assert early.status_code == 503 and early.json()["replicas_ready"] == 0, "live long before ready"
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert live_s < time.monotonic() - began
        assert world.post([PICTURE]).status_code == 200


def test_a_worker_that_dies_in_the_start_sends_all_through_a_new_roll_call(qwen_tiny: Path) -> None:
    """Kill one worker as soon as it is seen, whatever it is doing: the world comes up all the same."""
    with World("--model-path", str(qwen_tiny), "--tp-size", "2", nproc=4) as world:
        world.start()
        os.kill(world.wait_for("a worker", lambda: world.find("worker rank=3")), signal.SIGKILL)
        world.wait_ready(replicas=2)
        assert len(world.encode([PICTURE] * 4)) == 4


# -- restarts


def test_killed_keepers_are_recovered_by_torchrun(qwen_tiny: Path) -> None:
    """The elected one, another one, and the elected one again."""
    want = QwenReference(qwen_tiny).tokens(PICTURE)
    flags = ("--model-path", str(qwen_tiny), "--tp-size", "2")
    with World(*flags, nproc=4, torchrun_flags=("--max-restarts", "3")) as world:
        world.start().wait_ready(replicas=2)
        for victim in (0, 3, 0):
            old = {p["pid"] for p in world.info()["processes"]}
            os.kill(world.pid("keeper", victim), signal.SIGKILL)
            world.wait_for("a new world", partial(_all_new, world, old))
            world.note_processes()
            assert off_by(world.encode([PICTURE])[0], want) <= 1e-5
        world.terminate()
        world.wait_end()
        world.assert_nothing_left()


def _all_new(world: World, old: set[int]) -> bool:
    info: dict[str, Any] = world.info()
    new = {p["pid"] for p in info["processes"]}
    return bool(info["ready"]["replicas_ready"] == info["ready"]["replicas"] and not new & old)


def test_two_agents_start_serve_and_recover(qwen_tiny: Path) -> None:
    flags = ("--model-path", str(qwen_tiny), "--tp-size", "2")
    with World(*flags, nproc=2, agents=2, torchrun_flags=("--max-restarts", "3")) as world:
        world.start().wait_ready(replicas=2)
        want = QwenReference(qwen_tiny).tokens(PICTURE)
        for got in world.encode([PICTURE] * 4):
            assert off_by(got, want) <= 1e-5
        old = {p["pid"] for p in world.info()["processes"]}
        os.kill(world.pid("keeper", 3), signal.SIGKILL)
        world.wait_for("a new world", partial(_all_new, world, old))
        world.note_processes()
        for got in world.encode([PICTURE] * 4):
            assert off_by(got, want) <= 1e-5
        world.terminate()
        world.wait_end()
        world.assert_nothing_left()


def test_a_plain_srun_step(qwen_tiny: Path) -> None:
    """No torchrun: tasks with Slurm's own variables, here of two nodes that are one machine; rank 0 hosts the store."""
    with World("--model-path", str(qwen_tiny), "--tp-size", "2", torchrun=False) as world:
        step = {"STEP_NUM_TASKS": "4", "STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "127.0.0.1", "JOB_ID": "77"}
        port = f"MASTER_PORT={free_port()}"
        world.commands = [
            ["env", port, *(f"SLURM_{name}={value}" for name, value in (step | place).items()), *world.commands[0]]
            for place in (
                {"PROCID": str(rank), "LOCALID": str(rank % 2), "NODEID": str(rank // 2)} for rank in range(4)
            )
        ]
        world.start().wait_ready(replicas=2)
        want = QwenReference(qwen_tiny).tokens(PICTURE)
        assert all(off_by(got, want) <= 1e-5 for got in world.encode([PICTURE] * 4))
        world.terminate()
        assert world.wait_end() == [0] * 4
        world.assert_nothing_left()


# -- ends


def test_nothing_outlives_a_killed_torchrun(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), "--tp-size", "2", nproc=4) as world:
        world.start().wait_ready(replicas=2)
        world.launcher.kill()
        world.assert_nothing_left()


def test_ctrl_c_to_every_process_drains(qwen_tiny: Path) -> None:
    """As a terminal or a Slurm step does: torchrun and every keeper and worker get the signal themselves."""
    with World("--model-path", str(qwen_tiny), "--tp-size", "2", nproc=4) as world:
        world.start().wait_ready(replicas=2)
        for process in [
            psutil.Process(world.launcher.pid),
            *psutil.Process(world.launcher.pid).children(recursive=True),
        ]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may be through already
                process.send_signal(signal.SIGINT)
        world.wait_end()
        assert world.exit_codes() == dict.fromkeys(range(4), 0), world.log()[-3000:]
        world.assert_nothing_left()


def test_sigterm_during_the_start(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.start()
        world.wait_for("live", lambda: world.http.get("/health/live").status_code == 200)
        world.note_processes()
        world.terminate()
        assert world.wait_end() == [0]
        world.assert_nothing_left()


def test_a_second_signal_ends_at_once(qwen_tiny: Path) -> None:
    slow = "sha256:" + hashlib.sha256(PICTURE).hexdigest()
    flags = ("--model-path", str(qwen_tiny), "--max-batch-items", "1")
    with World(*flags, torchrun=False, env={"SPMD_ENCODER_FAULTS": f"hang@{slow}"}) as world:
        world.start().wait_ready()
        request = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import httpx; httpx.post('{world.url}/v1/encode', json={_one(PICTURE)!r}, timeout=60)",
            ],
            stderr=subprocess.DEVNULL,
        )
        world.wait_for("work", lambda: "spmd_encoder_items_in_hand 1.0" in world.http.get("/metrics").text)
        world.terminate()
        time.sleep(2.5)
        assert world.launcher.poll() is None, "it waits for what was accepted"
        world.terminate()
        assert world.wait_end() == [128 + signal.SIGTERM]
        request.kill()
        request.wait()
        world.assert_nothing_left()


def _one(picture: bytes) -> dict[str, Any]:
    return {"items": [{"image": data_uri(picture)}]}


def test_a_nursery_that_dies_three_times_in_a_minute_ends_the_rank(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.start().wait_ready()
        old = 0
        for _ in range(3):
            # As soon as it is there, ready or not: three deaths must fall into one minute.
            old = world.wait_for("another nursery", partial(_other_nursery, world, old))
            os.kill(old, signal.SIGKILL)
        assert world.wait_end() == [4]
        assert "the nursery died 3 times within 60 s" in world.log()
        world.assert_nothing_left()


def _other_nursery(world: World, old: int) -> int | None:
    found = [p["pid"] for p in world.info()["processes"] if p["role"] == "nursery" and p["pid"] != old]
    return found[0] if found else None


def test_a_world_of_one_survives_its_nursery(qwen_tiny: Path) -> None:
    """Also where no torchrun agent hosts the store."""
    want = QwenReference(qwen_tiny).tokens(PICTURE)
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.start().wait_ready()
        os.kill(world.pid("nursery"), signal.SIGKILL)
        world.wait_for("a new epoch", lambda: world.epoch(0) >= 1)
        world.wait_ready()
        assert off_by(world.encode([PICTURE])[0], want) <= 1e-6
        world.note_processes()
        world.terminate()
        assert world.wait_end() == [0]
        world.assert_nothing_left()


def test_a_caller_that_hangs_up_does_not_harm_the_nursery(qwen_tiny: Path) -> None:
    with World("--model-path", str(qwen_tiny), torchrun=False) as world:
        world.start().wait_ready()
        (path,) = world.tmp.glob("spmd_encoder*/nursery")
        nursery = world.pid("nursery")
        for _ in range(20):
            ends = [*socket.socketpair(), *socket.socketpair()]
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))
                socket.send_fds(caller, [b"fork"], [ends[0].fileno(), ends[2].fileno()])
            for end in ends:
                end.close()
        time.sleep(1.0)
        assert world.pid("nursery") == nursery
        assert world.epoch(0) == 0
        assert psutil.Process(nursery).is_running()
        assert world.post([PICTURE]).status_code == 200
